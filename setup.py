"""What pyproject.toml cannot say: with DEEPYTORCH_NATIVE=1 a wheel carries our C++, compiled.

    DEEPYTORCH_NATIVE=1 pip wheel --no-build-isolation --no-deps .

It is compiled for the torch and the Python of the environment that it is built in, which has to have deepytorch's
dependencies, and is used with these alone; with any other the wheel compiles at first use, as one without it does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CARRIES = os.environ.get("DEEPYTORCH_NATIVE", "0") == "1"
CODE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from deepytorch.comm.group.native import native as collectives
from deepytorch.passes.ops.native import can_build
from deepytorch.passes.ops.native import native as operators
collectives.carry(Path(sys.argv[2]) / "comm" / "built")
if can_build():
    operators.carry(Path(sys.argv[2]) / "passes" / "ops" / "built")
"""


class BuildPython(build_py):
    """Copies the modules, and compiles what they load."""

    def run(self) -> None:
        """Build, as setuptools does, and compile what the modules load."""
        super().run()
        if CARRIES and not self.editable_mode:
            folder = Path(self.build_lib).resolve() / "deepytorch"
            environment = {**os.environ, "DEEPYTORCH": "off"}
            subprocess.run([sys.executable, "-c", CODE, str(ROOT), str(folder)], env=environment, check=True)


class Platform(Distribution):
    """A wheel with machine code in it is one for this platform and this Python."""

    def has_ext_modules(self) -> bool:
        """Return whether the wheel has machine code in it."""
        return CARRIES


setup(cmdclass={"build_py": BuildPython}, distclass=Platform)
