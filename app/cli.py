"""The command line: options and the mouth that turns errors into one line and an exit code.

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

import functools
import inspect
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.exceptions import TyperException

from app import __version__

if TYPE_CHECKING:
    from app.settings import Resolved

command = typer.Typer(
    name="specexec",
    help="Run a language model larger than its memory limit, exactly, several tokens per pass.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

OK, ERROR, INTERRUPTED = 0, 1, 130

_Text = str | None
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
_Program = Literal["vllm", "sglang"]
Offline = Annotated[bool, typer.Option("--offline", help="Use nothing but what is on this machine.")]
_Figures = Annotated[bool, typer.Option("--json", help="End with a line that is one JSON object.")]


def _not_empty(value: Any) -> Any:
    """Refuses "", which is what a shell makes of a variable that is not set: to drop it would choose another model."""
    if value == "":
        raise typer.BadParameter("it is empty: give a value or leave it out")
    return value


def _option(name: str, metavar: str, what: str, panel: str = "Options") -> typer.models.OptionInfo:
    return typer.Option(name, metavar=metavar, help=what, rich_help_panel=panel, callback=_not_empty)


def _model(name: str, metavar: str, what: str) -> typer.models.OptionInfo:
    return _option(name, metavar, what, "Model")


def _memory(name: str, metavar: str, what: str) -> typer.models.OptionInfo:
    return _option(name, metavar, what, "Memory")


def _machine(name: str, metavar: str, what: str) -> typer.models.OptionInfo:
    return _option(name, metavar, what, "Another machine")


def _sampling(name: str, metavar: str, what: str) -> typer.models.OptionInfo:
    return _option(name, metavar, what, "Sampling")


@command.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False) -> None:
    if version:
        print(f"specexec {__version__}")
        raise typer.Exit


@command.command()
def run(
    context: typer.Context,
    prompt: Annotated[_Text, typer.Argument(help="What to answer; standard input where it is left out.")] = None,
    preset: Annotated[_Text, _model("--preset", "NAME|FILE", "Preset; demo unless a target is given.")] = None,
    target: Annotated[_Text, _model("--target", "MODEL", "Directory, .gguf file or Hub id to answer with.")] = None,
    engine: Annotated[_Text, _model("--engine", "URL", "Ask another OpenAI-compatible server instead.")] = None,
    bits: Annotated[_Text, _model("--bits", "16|8|4", "Weights of the target: quantized once, then cached.")] = None,
    draft: Annotated[
        _Text, _model("--draft", "auto|self|suffix|graft|none|[graft:]MODEL", "Where guesses come from.")
    ] = None,
    draft_bits: Annotated[_Text, _model("--draft-bits", "16|4", "4: an NF4 copy of a draft model.")] = None,
    draft_ctx: Annotated[_Text, _model("--draft-ctx", "N", "A draft model sees the last N tokens only.")] = None,
    draft_dtype: Annotated[
        _Text, _model("--draft-dtype", "bfloat16|float16|float32", "What a draft model computes in; as the target.")
    ] = None,
    past: Annotated[_Text, _model("--past", "on|off", "Whether suffix drafts keep answers on disk.")] = None,
    dtype: Annotated[_Text, _model("--dtype", "bfloat16|float16|float32", "What to compute in.")] = None,
    ctx: Annotated[_Text, _model("--ctx", "N", "Most tokens of prompt and answer together.")] = None,
    budget: Annotated[_Text, _model("--budget", "auto|N", "Most guesses verified in one pass.")] = None,
    device: Annotated[_Text, _memory("--device", "auto|cpu|cuda", "Where to compute.")] = None,
    device_limit: Annotated[_Text, _memory("--device-limit", "SIZE", "Memory of the device to use, as 8GB.")] = None,
    ram_limit: Annotated[_Text, _memory("--ram-limit", "SIZE", "Main memory to use, as 16GB.")] = None,
    slots: Annotated[_Text, _memory("--slots", "N", "Slots that streamed layers pass through.")] = None,
    resident: Annotated[_Text, _memory("--resident", "N", "Layers to keep in memory; as many as fit.")] = None,
    temp: Annotated[_Text, _sampling("--temp", "T", "Temperature; 0 is greedy.")] = None,
    top_p: Annotated[_Text, _sampling("--top-p", "P", "Keep the likeliest tokens of this total probability.")] = None,
    top_k: Annotated[_Text, _sampling("--top-k", "K", "Keep the K likeliest tokens; 0 keeps all.")] = None,
    min_p: Annotated[_Text, _sampling("--min-p", "P", "Drop tokens below this share of the likeliest one.")] = None,
    repeat_penalty: Annotated[
        _Text, _sampling("--repeat-penalty", "X", "Divide logits of tokens seen; 1: off.")
    ] = None,
    presence_penalty: Annotated[_Text, _sampling("--presence-penalty", "X", "Subtracted once a token is used.")] = None,
    frequency_penalty: Annotated[_Text, _sampling("--frequency-penalty", "X", "Subtracted for every use.")] = None,
    min_tokens: Annotated[_Text, _sampling("--min-tokens", "N", "Do not end before N tokens.")] = None,
    max_tokens: Annotated[_Text, _sampling("--max-tokens", "N", "End after N tokens.")] = None,
    seed: Annotated[_Text, _sampling("--seed", "N", "Same seed, same text, whatever the draft.")] = None,
    stop: Annotated[list[str] | None, _sampling("--stop", "TEXT", "End before this text; repeatable.")] = None,
    system: Annotated[_Text, _option("--system", "TEXT", "System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    offline: Offline = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Tell where every setting came from.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Answer again without a draft and compare.")] = False,
    debug: Debug = False,
) -> None:
    """Answer one prompt."""
    from app.presets import chosen_settings
    from app.settings import READERS

    try:
        flags = {key: value for key, value in context.params.items() if key in READERS and value is not None}
        chosen = chosen_settings(preset, flags)
        if raw and chosen.settings.system:
            raise ValueError("--system needs the chat template, which --raw leaves out")
        text = _read_prompt(prompt)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    from app.quiet import quiet_libraries

    quiet_libraries()  # before the imports below, some of which have notices of their own
    from app.run import run_prompt

    run_prompt(text, chosen, raw=raw, as_json=as_json, offline=offline, verbose=verbose, check=check)


@command.command()
def plan(
    context: typer.Context,
    preset: Annotated[_Text, _model("--preset", "NAME|FILE", "Preset; demo unless a target is given.")] = None,
    target: Annotated[_Text, _model("--target", "MODEL", "Directory (config.json suffices), .gguf or Hub id.")] = None,
    bits: Annotated[_Text, _model("--bits", "16|8|4", "Bits per weight at rest.")] = None,
    draft: Annotated[
        _Text, _model("--draft", "auto|self|suffix|graft|none|[graft:]MODEL", "Where guesses come from.")
    ] = None,
    draft_bits: Annotated[_Text, _model("--draft-bits", "16|4", "4: an NF4 copy of a draft model.")] = None,
    draft_ctx: Annotated[_Text, _model("--draft-ctx", "N", "A draft model sees the last N tokens only.")] = None,
    draft_dtype: Annotated[
        _Text, _model("--draft-dtype", "bfloat16|float16|float32", "What a draft model computes in; as the target.")
    ] = None,
    dtype: Annotated[_Text, _model("--dtype", "bfloat16|float16|float32", "What to compute in.")] = None,
    ctx: Annotated[_Text, _model("--ctx", "N", "Most tokens of prompt and answer together.")] = None,
    budget: Annotated[_Text, _model("--budget", "auto|N", "Most guesses verified in one pass.")] = None,
    gpu: Annotated[_Text, _machine("--gpu", "NAME|none", 'A machine that is not this one: "RTX 4090".')] = None,
    ram: Annotated[_Text, _machine("--ram", "SIZE", "Main memory of that machine, as 64GB.")] = None,
    disk_rate: Annotated[_Text, _machine("--disk-rate", "RATE", "Reading rate of its disk, as 3GB/s.")] = None,
    device: Annotated[_Text, _memory("--device", "auto|cpu|cuda", "Where to compute.")] = None,
    device_limit: Annotated[_Text, _memory("--device-limit", "SIZE", "Memory of the device to use, as 8GB.")] = None,
    ram_limit: Annotated[_Text, _memory("--ram-limit", "SIZE", "Main memory to use, as 16GB.")] = None,
    slots: Annotated[_Text, _memory("--slots", "N", "Slots that streamed layers pass through.")] = None,
    resident: Annotated[_Text, _memory("--resident", "N", "Layers to keep in memory; as many as fit.")] = None,
    as_json: _Figures = False,
    offline: Offline = False,
    debug: Debug = False,
) -> int:
    """Tell what fits, what streams and how fast it will be, before anything is downloaded."""
    from app.presets import chosen_settings
    from app.settings import READERS

    given = {key: value for key, value in context.params.items() if isinstance(value, str)}
    try:
        chosen = chosen_settings(preset, {key: value for key, value in given.items() if key in READERS})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    from app.quiet import quiet_libraries

    quiet_libraries()
    from app.plan_command import Elsewhere, show_plan

    try:
        elsewhere = Elsewhere.read(gpu, ram, disk_rate, device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return show_plan(chosen, elsewhere, given, as_json=as_json, offline=offline)


@command.command()
def doctor(
    as_json: _Figures = False,
    debug: Debug = False,
) -> int:
    """Check the installation and this machine, and say how to mend what is wrong."""
    from app.quiet import quiet_libraries

    quiet_libraries()
    from app.doctor import examine

    return examine(as_json=as_json)


def _with_settings_of_run(function: Callable[..., int]) -> Callable[..., int]:
    """A command that takes the settings of `run` beside its own options and gets them as `chosen`."""
    from app.settings import READERS

    own = [each for each in inspect.signature(function).parameters.values() if each.name != "chosen"]
    shared = [
        each
        for each in inspect.signature(run).parameters.values()
        if each.name in READERS or each.name in ("context", "preset")
    ]

    @functools.wraps(function)
    def called(context: typer.Context, preset: str | None, **given: Any) -> int:
        from app.presets import chosen_settings

        try:
            chosen = chosen_settings(preset, {key: given[key] for key in READERS if given.get(key) is not None})
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        from app.quiet import quiet_libraries

        quiet_libraries()
        return function(chosen, **{each.name: given[each.name] for each in own})

    parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in (*shared, *own)]  # so that defaults may come first
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in (*shared, *own)}
    del called.__wrapped__  # else its annotations would be looked at
    return called


@command.command()
@_with_settings_of_run
def chat(
    chosen: "Resolved",
    hide_thinking: Annotated[bool, typer.Option("--hide-thinking", help="Do not show <think> blocks.")] = False,
    offline: Offline = False,
    debug: Debug = False,
) -> int:
    """Talk with a model in the terminal; /help lists what can be typed."""
    from app.chat import talk

    return talk(chosen, hides_thinking=hide_thinking, offline=offline)


@command.command()
@_with_settings_of_run
def serve(
    chosen: "Resolved",
    host: Annotated[str, _option("--host", "ADDRESS", "Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, _option("--port", "N", "Port to listen on; 0 takes a free one.")] = 8080,
    api_key: Annotated[_Text, _option("--api-key", "KEY", "Key that clients must give; or SPECEXEC_API_KEY.")] = None,
    queue: Annotated[int, _option("--queue", "N", "Most requests that may wait.")] = 64,
    ui: Annotated[bool, typer.Option("--ui/--no-ui", help="Whether to serve the web page at /.")] = True,
    offline: Offline = False,
    debug: Debug = False,
) -> int:
    """Serve OpenAI's HTTP interface and a web page."""
    from app.environment import environment_api_key
    from app.serve import serve_model

    key = api_key or environment_api_key()
    return serve_model(chosen, host=host, port=port, api_key=key, with_ui=ui, offline=offline, max_waiting=queue)


@command.command()
@_with_settings_of_run
def bench(
    chosen: "Resolved",
    prompts: Annotated[
        _Text,
        typer.Argument(
            metavar="FILE|ID",
            help="JSONL, parquet or Hub data set; the package's own if left out.",
            callback=_not_empty,
        ),
    ] = None,
    out: Annotated[
        str, _option("--out", "DIR", "Where the log, results and plots go; goes on with a log there.")
    ] = "bench",
    drafts: Annotated[_Text, _option("--drafts", "A,B", "Drafts to compare; also chain, specinfer, specexec.")] = None,
    budgets: Annotated[
        _Text, _option("--budgets", "N,N", "Budgets to compare, auto too; --budget if left out.")
    ] = None,
    versus: Annotated[_Text, _option("--vs", "DRAFT", "Draft that the speed-up is against, as none.")] = None,
    number: Annotated[int | None, _option("--number", "N", "Only so many questions, categories taking turns.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    offline: Offline = False,
    debug: Debug = False,
) -> int:
    """Measure speed and acceptance over questions, drafts and budgets."""
    from app.settings import READERS

    if chosen.settings.engine and (drafts or budgets or versus):
        raise typer.BadParameter("--drafts, --budgets and --vs have no effect with an --engine: the server has its own")
    try:
        numbers = [READERS["budget"](each) for each in budgets.split(",")] if budgets else [chosen.settings.budget]
    except ValueError as error:
        raise typer.BadParameter(f"--budgets: {error}") from error
    if chosen.settings.engine:
        from app.bench_engine import bench_engine

        return bench_engine(chosen, prompts, Path(out), number=number, as_json=as_json, offline=offline)
    from app.bench import run_bench

    return run_bench(
        chosen,
        prompts,
        Path(out),
        drafts=drafts.split(",") if drafts else [chosen.settings.draft],
        budgets=numbers,
        versus=versus,
        number=number,
        as_json=as_json,
        offline=offline,
    )


@command.command()
@_with_settings_of_run
def export(
    chosen: "Resolved",
    program: Annotated[_Program, typer.Argument(help="Whose command to print.")],
    offline: Offline = False,
    debug: Debug = False,
) -> int:
    """Print the command that serves the same target and draft in vLLM or SGLang."""
    from app.export import print_command

    return print_command(program, chosen.settings, offline=offline)


@command.command()
def train(
    recipe: Annotated[str, _option("--recipe", "NAME|FILE", "What to train and how; eagle3, demo-dspark or a .toml.")],
    out: Annotated[
        str, _option("--out", "DIR", "Where checkpoints, curves and the draft go; goes on with a run there.")
    ],
    target: Annotated[_Text, _model("--target", "MODEL", "Directory or Hub id; the recipe's if left out.")] = None,
    prompts: Annotated[
        _Text, _option("--prompts", "FILE", "JSONL of prompts to be answered; the target's own.")
    ] = None,
    corpus: Annotated[_Text, _option("--corpus", "DIR", "Where the texts are or go; in --out if left out.")] = None,
    dtype: Annotated[_Text, _model("--dtype", "bfloat16|float16|float32", "What the target computes in.")] = None,
    device: Annotated[_Text, _memory("--device", "auto|cpu|cuda", "Where to compute.")] = None,
    as_json: _Figures = False,
    offline: Offline = False,
    debug: Debug = False,
) -> None:
    """Train a learned draft for a target, on texts that the target itself speaks."""
    from app.quiet import quiet_libraries

    quiet_libraries()
    from app.train_command import train_draft

    train_draft(
        recipe,
        {key: value for key, value in (("target", target), ("dtype", dtype), ("device", device)) if value},
        Path(out),
        prompts=Path(prompts) if prompts else None,
        corpus=Path(corpus) if corpus else None,
        as_json=as_json,
        offline=offline,
    )


@command.command()
def pull(
    model: Annotated[
        str, typer.Argument(metavar="NAME|ID", help="A preset, a Hub id or a .gguf file.", callback=_not_empty)
    ],
    offline: Offline = False,
    debug: Debug = False,
) -> None:
    """Fetch and convert what a preset or a model needs, so that it starts without a network."""
    from app.pull import pull_models

    pull_models(model, offline=offline)


@command.command("list")
def list_presets(
    as_json: _Figures = False,
    offline: Offline = False,
    debug: Debug = False,
) -> None:
    """Show the presets, what each would do on this machine, and why one would choose it."""
    from app.quiet import quiet_libraries

    quiet_libraries()
    from app.listing import show_presets

    show_presets(as_json=as_json, offline=offline)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, 1 (error), 2 (usage) or 130 (interrupted)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a console that lacks a character shows a question mark
    try:
        code = command(arguments, prog_name="specexec", standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:  # typer turns the first into the second where it sees it
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise  # a library's own
        return _end_quietly()
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except TyperException as error:
        print(f"specexec: {error.format_message()}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        print(f"specexec: {_one_line(error)}", file=sys.stderr)
        return ERROR
    if code == INTERRUPTED:  # typer, too, makes this of an interrupt
        print("specexec: interrupted", file=sys.stderr)
    return code or OK


def _read_prompt(argument: str | None) -> str:
    if argument is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("give a prompt as an argument or on standard input")
        argument = sys.stdin.read()
    if not argument.strip():
        raise ValueError("the prompt is empty")
    return argument


def _one_line(error: Exception) -> str:
    """What the user can act on; a failure that nobody foresaw also says its kind and how to see more."""
    message = " ".join(str(error).split())
    if isinstance(error, OSError) and _is_about_the_cache(error):
        message += "; set SPECEXEC_CACHE to a folder that can be written to"
    foreseen = isinstance(error, (ValueError, OSError, FloatingPointError)) or type(error).__module__.startswith(
        "offload"
    )
    return message if foreseen and message else f"{type(error).__name__}: {message} (--debug shows the traceback)"


def _is_about_the_cache(error: OSError) -> bool:
    """Whether the file it names is in the cache directory, or is a folder that this one would have to be made in."""
    from app.environment import cache_dir

    if not isinstance(error.filename, str):
        return False
    file, folder = Path(error.filename), cache_dir()
    return file.is_relative_to(folder) or file in folder.parents


def _end_quietly() -> int:
    """The reader of our output has left: nothing more can be said, and nothing went wrong."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OK
