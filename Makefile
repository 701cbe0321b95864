# Everything that has to hold before a change goes in: `make check`. `make format` mends what a tool can mend.
.PHONY: check lint test format formatted ruff types layers

check: lint test

lint: formatted ruff types layers

formatted:
	ruff format --check .

ruff:
	ruff check .

types:
	mypy

layers:
	lint-imports

test:
	pytest

format:
	ruff format .
	ruff check --fix .
