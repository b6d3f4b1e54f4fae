"""The file of a fleet: what it becomes, and errors that name the key, what was expected and what to do."""

from __future__ import annotations

import contextlib
import re
import socket
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.cli.cluster.config import _Model, _Server, plan_of, read_config
from kvasir.cli.cluster.ray_cluster import check_listens, check_room
from kvasir.cli.cluster.shown import shown
from kvasir.cli.cluster.spec import decode_spec, encode, spec_of
from kvasir.cli.cluster.yaml_file import MOST_BYTES, parse_yaml
from kvasir.cli.operation import OperationOptions
from kvasir.config import GIB, EngineOptions
from kvasir.errors import ConfigError
from tests.cli.running import ROOT

REACH = {"key": "/k/key", "cert": "/k/tls.crt", "cert_key": "/k/tls.key", "ca": "/k/ca.crt"}
FULL = """
name: mine
ray: {address: auto}
server:
  port: 8001
  api_key: [a-key-of-some-length]
  engine_timeout: 5
  data_dir: /data
models:
  - model: kvasir-mini
    served_model_name: mini
    min_replicas: 1
    max_replicas: 4
    adapters: {sql: loras/sql, dates: "loras/dates:0.5"}
    resources: {cpus: 4, gpus: 1, memory: 1073741824, custom: {a100: 1}}
    tensor_parallel: 2
    cache_dir: /cache
  - model: other
    prefill_replicas: 1
    decode_replicas: 2
"""


def planned(text: str):
    return plan_of(parse_yaml(text, "fleet.yaml"), "fleet.yaml")


def test_a_file_becomes_options_of_the_same_names():
    plan = planned(FULL)
    assert (plan.name, plan.ray.address, plan.server.port, plan.server.api_key) == (
        "mine",
        "auto",
        8001,
        ["a-key-of-some-length"],
    )
    assert plan.server.operation == OperationOptions(engine_timeout=5.0, data_dir=Path("/data"))
    mini, other = plan.models
    lora = ["sql=loras/sql", "dates=loras/dates:0.5"]
    given = {"threads": 4, "lora": lora, "tensor_parallel": 2, "cache_dir": "/cache"}
    assert mini.options == EngineOptions("kvasir-mini", "mini", **given)
    assert (mini.fleet.count, mini.fleet.most, mini.fleet.limits.least) == (1, 4, 1)
    assert other.options == EngineOptions("other", "other", threads=1) and other.fleet.count == 3


def test_values_may_be_written_as_for_the_flags():
    text = "models: [{model: m, max_model_len: 4k, kv_memory: 8GiB, dtype: bf16, resources: {memory: 2GB}}]"
    [model] = planned(text).models
    assert model.options == EngineOptions("m", "m", threads=1, max_model_len=4096, kv_memory=8 * GIB, dtype="bfloat16")
    assert model.resources.memory_bytes == 2 * 10**9


def test_options_may_have_the_names_of_all_their_flags():
    text = (
        "models: [{model: m, tensor_parallel_size: 2, data_parallel_size: 3}]\nserver: {otlp_traces_endpoint: http://h}"
    )
    plan = planned(text)
    assert plan.models[0].options.tensor_parallel == 2 and plan.models[0].fleet.count == 3
    assert plan.server.operation.otlp_endpoint == "http://h"
    with pytest.raises(
        ConfigError, match=r"models\[0\].tensor_parallel_size: the option tensor_parallel is there twice"
    ):
        planned("models: [{model: m, tensor_parallel: 2, tensor_parallel_size: 2}]")


def test_every_option_of_an_engine_and_of_a_server_is_a_key_or_decided():
    decided = {"lora", "role", "transfer_listen", "transfer_peer", "cache_offer", "cache_peer"}
    named = {f.name for f in fields(EngineOptions) if "help" in f.metadata or f.name == "model"}
    assert named - {*_Model.__struct_fields__} == decided
    assert {f.name for f in fields(OperationOptions)} <= {*_Server.__struct_fields__}


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[1]", "the file: Expected `object`", "docs/fleet.md"),
        ("name: x", "missing required field `models`", "docs"),
        ("models: []", "models: the list is empty", "- model:"),
        ("models: [{model: m, replica: 2}]", "models[0].replica: there is no such key", "did you mean replicas?"),
        ("models: [{model: m}, {model: n, replicas: two}]", "models[1].replicas: Expected `int`, got `str`", "docs"),
        ("models: [{model: m, replicas: 0}]", "models[0]: replicas is 0", "expected 1 to 1024"),
        ("models: [{model: m, block_size: 7}]", "models[0]: block_size is 7", "8, 16"),
        ("models: [{replicas: 2}]", "models[0]: the key `model` is missing", "org/name"),
        ("models: [{model: m, role: prefill}]", "models[0].role: there is no such key", "expected some of"),
        ("models: [{model: m, resources: {cpus: -1}}]", "cpus is -1", "docs"),
        ("models: [{model: m, resources: {memory: 2GX}}]", "memory is '2GX'", "docs"),
        ("models: [{model: m, resources: {memory: 0}}]", "memory is 0", "docs"),
        ("models: [{model: m, kv_memory: 8GX}]", "models[0]: kv_memory: '8GX' is not a size such as 8GB", "correct it"),
        ("models: [{model: m, max_model_len: 4x}]", "models[0]: max_model_len: '4x' is not a number", "correct it"),
        ("models: [{model: m, resources: {cpu: 1}}]", "models[0].resources.cpu: there is", "did you mean cpus?"),
        ("models: [{model: m}, {model: m}]", "two have the same name", "served_model_name"),
        ("models: [{model: m}]\nserver: {prot: 1}", "server.prot: there is no such key", "did you mean port?"),
        ("models: [{model: m}]\nserver: {keys: 1}", "server.keys", "docs"),
        ("models: [{model: m}]\nserver: {api_workers: 0}", "api_workers", "expected 1"),
        ("models: [{model: m}, {model: n}]\nserver: {api_workers: 2}", "server.api_workers", "single model"),
        ("models: [{model: m}]\nray: {address: 'ray://x:1'}", "ray: address is", "docs"),
        ("models: [{model: m}]\nray: {address: auto, num_cpus: 1}", "num_cpus", "docs"),
        ("models: [{model: m}]\nreach: {key: a}", "reach: Object missing required field", "docs"),
        ("models: [{model: m}]\nname: My Fleet", "name: 'My Fleet' is no name", "lower-case"),
        ("models: [{model: m, min_replicas: 2, max_replicas: 1}]", "models[0]: max_replicas is 1", "raise"),
        ("a: 1\na: 2", "line 2: the key 'a' occurs twice", "YAML"),
        ("1: x", "line 1: the key '1' is not a text", "YAML"),
        ("a: &x 1\nb: *x", "line 2: aliases", "YAML"),
        ("a: [", "line 1", "YAML"),
        ("a: !!python/object/apply:os.system [ls]", "python/object", "YAML"),
        ("[" * 100 + "]" * 100, "more than 32 levels", "YAML"),
    ],
)
def test_errors_say_where_what_and_what_to_do(text, message, hint):
    with pytest.raises(ConfigError) as error:
        planned(text)
    assert message in error.value.message and hint in error.value.hint, error.value
    assert error.value.message.startswith("fleet.yaml")


def test_files_that_are_no_text(tmp_path):
    for data, message in ((b"\xff\xfe", "UTF-8"), (b"#" * (MOST_BYTES + 1), "bytes")):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(ConfigError, match=message):
            read_config(tmp_path / "x")
    with pytest.raises(ConfigError, match="No such file"):
        read_config(tmp_path / "absent")


KEYS = st.sampled_from(
    [*_Model.__struct_fields__, *_Server.__struct_fields__, "models", "server", "ray", "reach", "resources", "name"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | KEYS, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4), st.dictionaries(KEYS, VALUES, max_size=4), st.text(max_size=40))
def test_no_data_gives_another_error(file, model, text):
    for data in (yaml.safe_dump({"models": [{"model": "m", **model}], **file}), text):
        with contextlib.suppress(ConfigError):
            planned(data)


def test_what_an_actor_gets_is_what_was_planned():
    plan = planned(FULL + f"    transfer_key: /t/key\n    transfer_cert: /t/pem\nreach: {REACH}")
    mini, other = plan.models
    first, last = (spec_of(plan, mini, i, 5.0, []) for i in (0, 3))
    assert decode_spec(encode(first)) == first
    assert first.options.cache_dir == "/cache/replica-0" and last.options.cache_dir == "/cache/replica-3"
    assert first.options.cache_disk == 4 * GIB
    assert first.actor != last.actor and first.actor == spec_of(plan, mini, 0, 5.0, []).actor
    assert first.actor != spec_of(plan, mini, 0, 6.0, []).actor, "other options are another actor"
    assert [spec_of(plan, other, i, 5.0, []).options.role for i in range(3)] == ["prefill", "decode", "decode"]
    on_one_node = [spec_of(plan, other, i, 5.0, ["/s/0", "/s/1"]).options for i in range(3)]
    assert on_one_node[0].transfer_peer == ["/s/0", "/s/1"] and on_one_node[2].transfer_listen == "/s/1"


def test_roles_on_several_nodes_need_a_key_and_a_certificate():
    with pytest.raises(ConfigError, match=r"models\[1\].*transfer_key"):
        planned(FULL + f"reach: {REACH}")


def test_check_shows_what_would_run_without_ray(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text(FULL)
    for flag in ("--check", "--dry-run"):
        result = CliRunner().invoke(app, ["fleet", str(path), flag])
        assert result.exit_code == 0, result.output
    for part in (
        "the fleet mine",
        "http://127.0.0.1:8001, API processes: 1",
        "ray       auto",
        "mini (kvasir-mini)",
        "1 at the start, then 1 to 4",
        "4 CPU, 1 GPU, 1 GiB, 1 a100",
        "tensor_parallel=2",
        "sql=loras/sql",
        "1 for prompts, 2 for answers",
    ):
        assert part in result.output, part
    path.write_text("models: [{model: m, replicas: 0}]")
    assert isinstance(CliRunner().invoke(app, ["fleet", str(path), "--check"]).exception, ConfigError)
    path.write_text("models: [{model: m}]\nserver: {api_key: [short]}")
    error = CliRunner().invoke(app, ["fleet", str(path), "--check"]).exception
    assert isinstance(error, ConfigError) and "fleet.yaml: server: " in error.message


def test_the_example_of_the_page_is_shown_as_it_says():
    page = (ROOT / "docs" / "fleet.md").read_text().partition("## On Ray")[2]
    found = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    said = re.search(r"fleet.yaml --check\n(.*?) +\.\.\.\n", page, re.DOTALL)
    assert found and said
    lines = [line.removeprefix("    ") for line in said[1].splitlines()]
    assert [*shown(planned(found[1]))][: len(lines)] == lines


def test_the_commands_of_a_running_fleet_are_still_commands():
    help = CliRunner().invoke(app, ["fleet", "--help"])
    assert all(name in help.output for name in ("run", "status", "restart", "scale", "kvasir fleet fleet.yaml"))
    assert "--url" in CliRunner().invoke(app, ["fleet", "status", "--help"]).output
    assert isinstance(CliRunner().invoke(app, ["fleet", "absent.yaml"]).exception, ConfigError)


def test_replicas_that_have_no_room_are_refused():
    plan = planned(FULL)
    room = {"CPU": 7.0, "GPU": 1.0, "memory": float(GIB), "a100": 1.0}
    check_room(plan.models, room)
    for name in room:
        with pytest.raises(ConfigError, match=f"need .* {name}, and this machine has"):
            check_room(plan.models, {**room, name: room[name] - 0.5})
        with pytest.raises(ConfigError, match=f"need .* {name}, and this machine has 0"):
            check_room(plan.models, {other: room[other] for other in room if other != name})


def test_an_address_where_nothing_listens_is_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_listens(f"127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999999"):
        with pytest.raises(ConfigError, match="there is no Ray cluster at"):
            check_listens(address)


def test_models_that_are_not_there_are_named_before_ray_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr("kvasir.cli.cluster.command.RayCluster", None)
    path = tmp_path / "fleet.yaml"
    for model, words in (("absent", "absent: no such file"), ("kvasir-mini, adapters: {red: nowhere}", "nowhere: no")):
        path.write_text(f"models: [{{model: kvasir-mini, served_model_name: x}}, {{model: {model}}}]")
        error = CliRunner().invoke(app, ["fleet", str(path)]).exception
        assert isinstance(error, ConfigError) and "models[1]: " in error.message and words in error.message, error
