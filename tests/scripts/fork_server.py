"""Runs scripts in children forked from a process that has imported torch and transformers already.

Started as a script by `runner.Runner`. It reads one request a line from stdin and answers each with one line on stdout,
both JSON. What a child records, prints and raises is in files of the request's folder, one pair a rank.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import peft  # noqa: F401
import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed
import torch.nn.parallel
import transformers
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import (  # noqa: F401, each loads its own file (`Trainer` starts a thread, which a fork would lose)
    BartForConditionalGeneration,
    BertModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
)


def main() -> None:
    """Serve until stdin ends."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"a process with {num_threads} threads cannot be forked safely"
    answers = os.fdopen(os.dup(1), "w")
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_serve(json.loads(line))) + "\n")
        answers.flush()
    os._exit(0)  # the interpreter's own last steps would take a second


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    """Fork one child a rank, and wait for them: until the deadline, then they are killed."""
    started = time.monotonic()
    port = _free_port()
    waiting = {_fork(request, rank, port): rank for rank in range(request["ranks"])}
    status: dict[int, int | None] = dict.fromkeys(waiting.values())
    while waiting and time.monotonic() - started < request["deadline_s"]:
        for process in list(waiting):
            ended, code = os.waitpid(process, os.WNOHANG)
            if ended:
                status[waiting.pop(process)] = os.waitstatus_to_exitcode(code)
        time.sleep(0.005)
    for process in waiting:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return {"status": [status[rank] for rank in sorted(status)], "seconds": time.monotonic() - started}


def _fork(request: dict[str, Any], rank: int, port: int) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()  # what it starts can be ended with it
        _redirect(Path(request["folder"]) / f"{rank}.log")
        if request["ranks"] > 1:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(request["ranks"]))
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(request["ranks"]))
        outcome = _run(request)
        (Path(request["folder"]) / f"{rank}.json").write_text(json.dumps(outcome))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: Path) -> None:
    """Stdin is empty from now on; stdout and stderr go to `log`."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(nothing, 0)
    os.dup2(written, 1)
    os.dup2(written, 2)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    """Run the script as `python script.py` would; returns what it recorded, what it raised and what was compiled."""
    os.environ["SCENARIO_TIMES"] = str(request["times"])
    deepytorch = _prepare(request)
    path = Path(request["script"])
    script = ModuleType("__main__")
    script.__file__ = str(path)
    sys.modules["__main__"] = script
    sys.argv = [str(path), *filter(None, [request["case"]])]
    sys.path[0] = str(path.parent)
    raised, error = None, ""
    try:
        exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), vars(script))
        history = [list(numbers(entry)) for entry in vars(script)["history"]]
    except BaseException as found:
        raised, error = type(found).__name__, traceback.format_exc()
        history = [list(numbers(entry)) for entry in vars(script).get("history", [])]
    report = None if deepytorch is None else deepytorch.report().to_json()
    return {"history": history, "raised": raised, "error": error, "report": report}


def _prepare(request: dict[str, Any]) -> Any:
    """What stands before the script's first line; returns deepytorch where it is imported."""
    if request["variant"] == "default":
        return _in_the_default_mode()
    if request["variant"] == "import":
        import deepytorch

        if request["lowering"] != "inductor":
            deepytorch.configure(options={"lowering": request["lowering"]})
        return deepytorch
    os.environ["DEEPYTORCH"] = "off"
    if request["variant"].startswith("moved-"):
        eps = torch.finfo(getattr(torch, request["precision"])).eps
        _move_weights(eps, seed=int(request["variant"].removeprefix("moved-")))
    return None


def _in_the_default_mode() -> Any:
    """deepytorch, which takes this process for one that has run for days, so that it can afford every trace. Each step
    of an optimizer waits for what is compiled beside: what a script of a few steps runs is compiled from then on.
    """
    os.environ["DEEPYTORCH_COMPILE"] = "background"
    import deepytorch
    from deepytorch import process_facts
    from deepytorch.compiler.code import compilers
    from deepytorch.compiler.code.worker.queue import Compilation
    from deepytorch.compiler.step import kept_choices

    kept_choices.KeptChoice.read = lambda _: None  # forms are tried, whatever an earlier run has found
    process_facts._BEGAN -= 1e6
    compile_in_worker, under_way = compilers.compile_in_worker, list[Compilation]()

    def compile_and_note(*arguments: Any) -> Compilation:
        under_way.append(compile_in_worker(*arguments))
        return under_way[-1]

    def wait(*_: Any) -> None:
        for each in under_way:
            each.done.wait()
        under_way.clear()

    compilers.compile_in_worker = compile_and_note
    register_optimizer_step_post_hook(wait)
    return deepytorch


def _move_weights(eps: float, seed: int) -> None:
    """Every weight that is given to an optimizer is moved there, once, up or down by its last bit."""
    initialize, moved = torch.optim.Optimizer.__init__, torch.nn.ParameterList()
    generator = torch.Generator().manual_seed(seed)

    def initialize_moved(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            if weight.is_floating_point() and all(weight is not each for each in moved):
                moved.append(weight)
                away = torch.randint(0, 2, weight.shape, generator=generator).mul(2).sub(1).to(weight.dtype) * torch.inf
                with torch.no_grad():
                    if eps < torch.finfo(weight.dtype).eps * 2:
                        weight.copy_(torch.nextafter(weight, away))
                    else:
                        weight.add_(weight.abs() * eps / 2 * away.sign())

    torch.optim.Optimizer.__init__ = initialize_moved  # type: ignore[method-assign]


def numbers(entry: Any) -> Iterator[float]:
    """The numbers in an entry of a history: a number, a tensor, or lists and dictionaries of these."""
    if isinstance(entry, torch.Tensor):
        yield from entry.detach().double().reshape(-1).tolist()
    elif isinstance(entry, dict):
        yield from numbers(entry.values())
    elif isinstance(entry, Iterable):
        for each in entry:
            yield from numbers(each)
    else:
        yield float(entry)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
