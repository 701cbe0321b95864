"""The folder that `deepytorch run` puts in front of PYTHONPATH: its `sitecustomize` runs where a Python starts."""

from pathlib import Path

FOLDER = str(Path(__file__).resolve().parent)
