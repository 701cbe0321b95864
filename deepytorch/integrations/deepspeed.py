"""DeepSpeed: `engine.compile(backend="deepytorch")` compiles the engine's module as the import would, in place.

ZeRO-1 and 2 leave the module whole. ZeRO-3's hooks cut its graph, and the batch is packed at model entry.
"""

from __future__ import annotations

from typing import Any

from deepytorch.errors import ConfigError
from deepytorch.patches import replace


def attach(engine_module: Any) -> None:
    """Take over `DeepSpeedEngine.compile` if our backend is asked for. `engine_module`: deepspeed.runtime.engine."""

    def compiling(original: Any) -> Any:
        def compile_engine(
            self: Any, backend: Any = None, compile_kwargs: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            given = dict(compile_kwargs or {})
            if backend != "deepytorch":
                given_backend = {} if backend is None else {"backend": backend}
                return original(self, *args, **given_backend, compile_kwargs=given, **kwargs)
            if self.is_deepcompile_enabled():
                raise ConfigError(
                    'engine.compile(backend="deepytorch") with "deepcompile": true in the DeepSpeed configuration; '
                    "expected one of the two, since DeepCompile has a backend of its own: set it to false"
                )
            from deepytorch import autowrap, handles

            if not self.is_compiled and not handles.armed(self.module):
                autowrap.optimize(self.module, mode=given.get("mode"), options=given.get("options"))
            self._is_compiled = True
            return None

        return compile_engine

    replace(
        engine_module.DeepSpeedEngine, "compile", compiling, 'compile in place where backend="deepytorch" is asked for'
    )
