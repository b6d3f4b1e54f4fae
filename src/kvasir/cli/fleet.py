"""`kvasir fleet`: serves a fleet on Ray, and shows and changes the replicas of a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kvasir.cli.arguments import Verbose
from kvasir.cli.help import App, Group


class ConfigOrCommand(Group):
    """`kvasir fleet CONFIG ...` is `kvasir fleet run CONFIG ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


HELP = """Serve a fleet on Ray (kvasir fleet CONFIG), or show and change the replicas of a running server.

Example: kvasir fleet fleet.yaml

Example: kvasir fleet status --url http://127.0.0.1:8000"""
app = App(cls=ConfigOrCommand, help=HELP)

Url = Annotated[str, typer.Option(help="Where the server is.")]
Key = Annotated[str | None, typer.Option("--api-key", help="Key of the server; changes need the scope management.")]
Model = Annotated[str | None, typer.Option(help="Which model, on a server of several (default: the first one).")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
Grace = Annotated[float, typer.Option(help="Seconds for a replica to finish its requests before they move.", min=0)]
LONGEST = 3600.0  # seconds that a change may take, besides its grace
SERVER = "http://127.0.0.1:8000"


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="YAML file of the fleet; see docs/fleet.md.")],
    check: Annotated[bool, typer.Option("--check", "--dry-run", help="Show what would run, without Ray.")] = False,
    ray_address: Annotated[str | None, typer.Option(help="HOST:PORT of the Ray cluster, not the file's.")] = None,
    supervised: Annotated[bool, typer.Option(hidden=True, help="End when the standard input ends.")] = False,
    verbose: Verbose = False,
) -> None:
    """Serve the models of a file, with replicas that are actors of a Ray cluster; needs kvasir-llm[fleet].

    Example: kvasir fleet fleet.yaml

    Example: kvasir fleet fleet.yaml --check
    """
    from kvasir.cli.cluster import command

    command.run(config, check, ray_address, supervised, verbose)


@app.command()
def status(
    model: Annotated[str | None, typer.Option(help="Which model (default: all loaded ones).")] = None,
    url: Url = SERVER,
    api_key: Key = None,
    json: AsJson = False,
) -> None:
    """List the replicas with their states and loads.

    Example: kvasir fleet status
    """
    first = _asked(url, api_key, "GET", "/fleet", model)
    names = [] if model else [name for name in first["models"] if name != first["model"]]
    _show([first, *(_asked(url, api_key, "GET", "/fleet", name) for name in names)], json)


@app.command()
def restart(
    replica: Annotated[int | None, typer.Argument(help="Number of a replica (default: all, in turn).", min=0)] = None,
    grace: Grace = 0.0,
    model: Model = None,
    url: Url = SERVER,
    api_key: Key = None,
    json: AsJson = False,
) -> None:
    """Replace replicas while they serve; no stream breaks.

    Example: kvasir fleet restart --grace 10
    """
    path = "/fleet/restart" if replica is None else f"/fleet/replicas/{replica}/restart"
    _show([_asked(url, api_key, "POST", path, model, {"grace": grace})], json)


@app.command()
def scale(
    replicas: Annotated[int, typer.Argument(help="How many there are to be; at most --max-replicas.", min=0)],
    grace: Grace = 0.0,
    model: Model = None,
    url: Url = SERVER,
    api_key: Key = None,
    json: AsJson = False,
) -> None:
    """Start or end replicas while they serve; no stream breaks.

    Example: kvasir fleet scale 4
    """
    _show([_asked(url, api_key, "POST", "/fleet/scale", model, {"replicas": replicas, "grace": grace})], json)


def _asked(
    url: str, key: str | None, method: str, path: str, model: str | None, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The replicas of a model, None for the first one, as the server answers. Raises KvasirError."""
    from kvasir.cli.store import ask

    named = f"{path}?model={quote(model, safe='')}" if model else path
    return ask(url, key, method, named, body, LONGEST + (body or {}).get("grace", 0.0))


def _show(answers: list[dict[str, Any]], as_json: bool) -> None:
    """Prints the replicas of models; with a title for each if there are several."""
    from kvasir.cli.show import print_json, print_table

    if as_json:
        return print_json(answers[0] if len(answers) == 1 else {"models": answers})
    columns = ("replica", "status", ">open", ">backlog", ">routed", ">lost", ">moved", ">hits", ">restarts", ">pid")
    for answer in answers:
        if len(answers) > 1:
            print("" if answer is answers[0] else "\n", "model ", answer["model"], sep="")
        print_table(columns, [_row(replica) for replica in answer["replicas"]])
        if scaling := answer.get("scaling"):
            print("wanted: {target} ({least} to {most})".format(**scaling))


def _row(replica: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{replica['index']} ({replica['role']})" if replica["role"] else str(replica["index"]),
        f"{replica['status']}: {replica['reason']}" if replica["reason"] else replica["status"],
        str(replica["open"]),
        f"{replica['backlog']:.2f} s",
        str(replica["routed"]),
        str(replica["lost"]),
        str(replica["moved"]),
        f"{replica['hit']} of {replica['predicted']}",
        str(replica["restarts"]),
        str(replica["pid"] or ""),
    )
