"""Modelfiles and the parameters in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import InvalidRequest
from kvasir.store.modelfile import Modelfile, parse_modelfile, write_modelfile
from kvasir.store.parameters import (
    ENGINE,
    IGNORED,
    REFUSED,
    SAMPLING,
    check_parameters,
    engine_options_of,
    parse_parameter,
    sampling_of,
)

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=40).filter(
    lambda t: '"""' not in t and not t.endswith('"') and t == t.replace("\ufeff", "")
)
PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_k": st.integers(0, 100),
        "num_ctx": st.integers(1, 9999),
        "num_predict": st.integers(-2, 99).filter(bool),
        "stop": st.lists(TEXT.filter(bool), min_size=1, max_size=3),
        "use_mmap": st.booleans(),
    },
)


@given(
    st.builds(
        Modelfile,
        from_=st.just(("qwen3:0.6b",)),
        parameters=PARAMETERS,
        template=st.none() | TEXT,
        system=st.none() | TEXT,
        messages=st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(("user", "assistant")), "content": TEXT}), max_size=3
        ).map(tuple),
        license=st.lists(TEXT, max_size=2).map(tuple),
        requires=st.sampled_from(("", "0.14.0")),
        draft=st.none() | TEXT.filter(bool),
    )
)
def test_a_written_modelfile_is_read_back(model):
    assert parse_modelfile(write_modelfile(model)) == model


def test_a_handwritten_modelfile_is_read():
    model = parse_modelfile(
        "\ufeff# my own\r\n  from ./m.gguf\r\nParameter temperature 0.7\n"
        'PARAMETER stop <|end|>\nPARAMETER STOP "User: "\n'
        'SYSTEM """You are\n# no comment\nMario."""\n\nMESSAGE user Is Toronto in Canada?\nmessage assistant yes\n'
        'TEMPLATE "{{ messages }}"\nLICENSE """MIT\n"""\nPARAMETER temperature 1\nREQUIRES 0.14.0\ndraft ./small.gguf'
    )
    assert model == Modelfile(
        ("./m.gguf",),
        {"temperature": 1.0, "stop": ["<|end|>", "User: "]},
        template="{{ messages }}",
        system="You are\n# no comment\nMario.",
        messages=(
            {"role": "user", "content": "Is Toronto in Canada?"},
            {"role": "assistant", "content": "yes"},
        ),
        license=("MIT\n",),
        requires="0.14.0",
        draft="./small.gguf",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no FROM"),
        ("FROM", "no FROM"),
        ("SYSTEM x", "no FROM"),
        ("FROM a\nFORM b", "line 2.*'FORM'"),
        ('FROM a\nSYSTEM """x', "line 2.*SYSTEM"),
        ('FROM a\nSYSTEM "x" y', "line 2.*SYSTEM"),
        ("FROM a\nADAPTER", "line 2.*ADAPTER names nothing"),
        ("FROM a\nRENDERER qwen3", "RENDERER"),
        ('FROM a\nDRAFT ""', "DRAFT names nothing"),
        ("FROM a\nMESSAGE tool x", "MESSAGE of 'tool'"),
        ("FROM a\nPARAMETER temperature warm", "line 2.*temperature.*'warm'"),
        ("FROM a\nPARAMETER temperature -1", "temperature.*-1"),
        ("FROM a\nPARAMETER top_k 1.5", "top_k.*'1.5'"),
        ("FROM a\nPARAMETER mirostat 1", "mirostat"),
        ("FROM a\nPARAMETER tfs_z 0.9", "tfs_z"),
        ("FROM a\nPARAMETER repeat_last_n -2", "repeat_last_n"),
        ("FROM a\nPARAMETER num_ctx 0", "num_ctx.*0"),
        ("FROM a\nPARAMETER warmth 1", "parameter 'warmth'"),
        ("FROM a\nREQUIRES soon", "REQUIRES 'soon'"),
    ],
)
def test_malformed_modelfiles_are_refused(text, message):
    with pytest.raises(InvalidRequest, match=message):
        parse_modelfile(text)


@given(st.text(max_size=200) | st.text('FROM PARAMETERSYSTEM"\n \tx01#', max_size=200))
def test_hostile_text_is_read_or_refused(text):
    try:
        assert parse_modelfile(text).from_
    except InvalidRequest as error:
        assert error.message


def test_each_parameter_is_honoured_ignored_or_refused():
    assert not set(SAMPLING) & set(REFUSED) and not set(IGNORED) & {*SAMPLING, *ENGINE, *REFUSED}
    for name, (harmless, _) in REFUSED.items():
        for value in harmless:
            assert check_parameters({name: value}) == {name: value}
        with pytest.raises(InvalidRequest, match=name) as error:
            check_parameters({name: not harmless[0] if isinstance(harmless[0], bool) else 7})
        assert error.value.param == name


def test_parameters_become_sampling_and_engine_options():
    reported = check_parameters(
        {"num_predict": -1, "repeat_penalty": 1.1, "stop": "x", "seed": 3, "num_ctx": 128, "top_k": None}
    )
    assert sampling_of(reported) == {
        "max_tokens": None, "repetition_penalty": 1.1, "repetition_last_n": 64, "stop": ("x",), "seed": 3,
    }  # fmt: skip
    assert sampling_of({"repeat_penalty": 1.1, "repeat_last_n": 9})["repetition_last_n"] == 9
    assert sampling_of({"presence_penalty": 0.5})["occurrence_last_n"] == 64
    both = sampling_of(check_parameters({"repeat_last_n": 9, "frequency_penalty": 0.5}))
    assert (both["repetition_last_n"], both["occurrence_last_n"]) == (9, 9)
    assert engine_options_of(reported) == {"max_model_len": 128}
    assert sampling_of(check_parameters({"repeat_penalty": 1.1, "repeat_last_n": 0}))["repetition_penalty"] == 1.0
    assert sampling_of({"seed": -1}) == {"seed": None}
    assert parse_parameter("use_mmap", "true") is True


@pytest.mark.parametrize("value", [True, "1", [1], float("nan"), 10**400, {}])
def test_values_of_another_type_are_refused(value):
    for name in ("top_k", "temperature"):
        with pytest.raises(InvalidRequest, match=name):
            check_parameters({name: value})


def test_line_ends_of_any_number_of_returns_are_one():
    """So that what was parsed and written parses to the same."""
    model = parse_modelfile('FROM a\r\r\nSYSTEM """x\r\r\ny\rz"""\r\n')
    assert model.system == "x\ny\rz"
    assert parse_modelfile(write_modelfile(model)) == model
