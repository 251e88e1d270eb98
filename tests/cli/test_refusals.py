"""What is asked wrongly is refused with its name and range, what failed is told as one message."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specdecode.cli import flags
from specdecode.cli.app import app
from specdecode.cli.plan import StackFlags
from specdecode.config import DraftSettings, RouterSettings, TargetSettings
from tests.cli.running import DEADLINE, PROGRAM, environment

RUNNER = CliRunner()
COMMANDS = [
    "up",
    "generate",
    "chat",
    "status",
    "demo",
    "figures",
    "policy show",
    "policy set",
    "models fetch",
    "models list",
    "models convert",
]


def invoke(*args: str, **variables: str) -> Any:
    return RUNNER.invoke(app, args, env={"COLUMNS": "200", **variables}, prog_name="specdecode")


def help_of(command: str) -> str:
    """Its help as one line."""
    shown = invoke(*command.split(), "--help")
    assert shown.exit_code == 0, shown.output
    return " ".join(shown.output.split())


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--max-tokens", "0", "1 to 2^32 - 1 tokens"),
        ("--max-tokens", "many", "1 to 2^32 - 1 tokens"),
        ("--min-tokens", "-1", "0 to 2^32 - 1 tokens"),
        ("--temperature", "2.01", "0 (greedy), or 1e-05 to 2"),
        ("--temperature", "-1", "0 (greedy), or 1e-05 to 2"),
        ("--temperature", "nan", "0 (greedy), or 1e-05 to 2"),
        ("--temperature", "0.000001", "0 (greedy), or 1e-05 to 2"),
        ("--top-p", "0", "above 0, to 1"),
        ("--top-p", "1.5", "above 0, to 1"),
        ("--top-k", "-1", "0 to 2^32 - 1 tokens"),
        ("--min-p", "1.1", "0 to 1"),
        ("--min-p", "nan", "0 to 1"),
        ("--repetition-penalty", "0", "above 0, to 2"),
        ("--presence-penalty", "-3", "-2 to 2"),
        ("--frequency-penalty", "inf", "-2 to 2"),
        ("--logit-bias", "5", "ID=BIAS, biases from -100 to 100"),
        ("--logit-bias", "5=101", "ID=BIAS, biases from -100 to 100"),
        ("--seed", str(2**64), "0 to 2^64 - 1"),
        ("--stop", "", "1 to 256 characters"),
        ("--stop", "x" * 257, "1 to 256 characters"),
        ("--stop-token-id", "-1", "0 to 2^32 - 1"),
        ("--speculation", "maybe", "auto, on, off"),
        ("--num-draft-tokens", "33", "0 to 32 tokens"),
        ("--drafter", "oracle", "ngram, model"),
        ("--method", "typical", "greedy, rejection, block, coupled"),
        ("--min-acceptance", "1.1", "0 to 1"),
        ("--min-acceptance", "nan", "0 to 1"),
        ("--tier", "gold", "interactive, batch"),
        ("--traffic-class", "x" * 65, "up to 64 printable characters"),
        ("--traffic-class", "a\tb", "up to 64 printable characters"),
        ("--n", "17", "1 to 16 texts"),
        ("--logprobs", "21", "0 to 20 tokens"),
        ("--address", "localhost", "host:port"),
        ("--address", "localhost:99999", "host:port"),
        ("--timeout", "0", "above 0, to 86400 seconds"),
    ],
)
def test_generate_refuses_a_wrong_value_by_name_and_range(option: str, value: str, allowed: str) -> None:
    for given, variables in (
        ([f"{option}={value}"], {}),
        ([], {f"SPECDECODE_{option[2:].replace('-', '_').upper()}": value} if value else {}),
    ):
        if not given and not variables:
            continue  # an empty variable is an absent one
        refused = invoke("generate", "hello", *given, **variables)
        assert refused.exit_code == 2, refused.output
        assert option in refused.stderr
        assert f"{value!r} is refused; allowed: {allowed}" in refused.stderr
        assert "Traceback" not in refused.stderr
        assert refused.stdout == ""


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--max-draft-tokens", "33", "0 to 32 tokens"),
        ("--num-draft-tokens", "-1", "0 to 32 tokens"),
        ("--max-tokens-in-flight", "262145", "0 to 262144 tokens"),
        ("--min-acceptance", "1.5", "SHARE or DRAFTER=SHARE, shares from 0 to 1"),
        ("--min-acceptance", "oracle=0.5", "SHARE or DRAFTER=SHARE, shares from 0 to 1"),
        ("--min-acceptance", "model=", "SHARE or DRAFTER=SHARE, shares from 0 to 1"),
        ("--max-temperature", "nan", "0 to 2"),
        ("--lease-seconds", "0", "0.001 to 60 seconds"),
        ("--batch-weight", "0", "above 0, to 1"),
    ],
)
def test_policy_set_refuses_a_wrong_value_by_name_and_range(option: str, value: str, allowed: str) -> None:
    refused = invoke("policy", "set", f"{option}={value}")
    assert refused.exit_code == 2, refused.output
    assert option in refused.stderr
    assert f"{value!r} is refused; allowed: {allowed}" in refused.stderr
    assert allowed in help_of("policy set")


def test_policy_set_takes_no_limit_from_a_variable_that_is_meant_for_requests() -> None:
    refused = invoke("policy", "set", SPECDECODE_NUM_DRAFT_TOKENS="3", SPECDECODE_MIN_ACCEPTANCE="0.5")
    assert refused.exit_code == 2
    assert "name at least one limit" in refused.stderr


def test_a_system_message_needs_chat() -> None:
    refused = invoke("generate", "hello", "--system=be brief")
    assert refused.exit_code == 2
    assert "--system" in refused.stderr


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--router-port", "65536", "0 to 65535"),
        ("--target-port", "-1", "0 to 65535"),
        ("--draft-port", "x", "0 to 65535"),
        ("--threads", "2000", "0 to 1024 threads"),
        ("--num-draft-tokens", "33", "0 to 32 tokens"),
        ("--draft-deadline-seconds", "0", "0.001 to 60 seconds"),
        ("--dtype", "float8", "'auto', 'float32', 'bfloat16' or 'float16'"),
        ("--drafter", "oracle", "'auto', 'ngram', 'suffix' or 'model'"),
        ("--kv-memory", "1KiB", "1MiB to 64TiB"),
        ("--log-level", "loud", "'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_up_refuses_a_wrong_value_by_name_and_range(option: str, value: str, told: str) -> None:
    refused = invoke("up", f"{option}={value}")
    assert refused.exit_code == 2, refused.output
    assert f"{option}: {value!r} is refused; allowed: " in refused.stderr
    assert told in refused.stderr


def test_up_names_everything_that_is_wrong_and_where_it_stands(tmp_path: Path) -> None:
    config = tmp_path / "specdecode.toml"
    config.write_text("[router]\nlease_tokens = 0\n")
    refused = invoke(
        "up",
        f"--config={config}",
        "--dtype=float8",
        SPECDECODE_TARGET_MAX_RUNNING="0",
        SPECDECODE_DRAFT_X="1",
    )
    assert refused.exit_code == 2
    for what in (
        f"{config} [router] lease_tokens",
        "--dtype",
        "SPECDECODE_TARGET_MAX_RUNNING",
        "SPECDECODE_DRAFT_X",
    ):
        assert what in refused.stderr


def test_up_refuses_a_port_that_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused = invoke("up", f"--router-port={port}", "--target-port=0", "--draft-port=0")
    assert refused.exit_code == 2
    assert f"--router-port: {port} is in use; 0 takes a free port" in refused.stderr


@pytest.mark.parametrize(
    "command", ["generate hello", "status", "chat", "figures", "policy show", "policy set --off"]
)
def test_without_a_router_the_message_says_how_to_start_one(command: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        failed = invoke(*command.split(), SPECDECODE_ADDRESS=address)
    assert failed.exit_code == 1
    assert failed.stderr.startswith(f"error: no router answers at {address}; start one with: specdecode up")
    assert failed.stdout == ""


def test_an_unknown_model_is_named_with_the_known_ones() -> None:
    failed = invoke("models", "fetch", "gpt-7")
    assert failed.exit_code == 1
    assert "'gpt-7'" in failed.stderr
    assert "smollm2-135m-instruct" in failed.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    assert help_of(command).startswith(f"Usage: specdecode {command}")


UNSAID = ("api_key", "tls_ca", "tls_cert", "tls_key")
"""Options whose absence goes without saying."""


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_says_the_variable_and_the_default_of_every_option(command: str) -> None:
    shown = help_of(command)
    bundles = (flags.SamplingFlags, flags.SpeculationFlags, flags.ConnectionFlags)
    for field in (field for bundle in bundles for field in fields(bundle)):
        option = f"--{field.name.replace('_', '-')}"
        told = re.search(rf"{option}\b[^()]*(\([^()]*\)[^()]*)*?\(([^()]*)env: (\w+)\)", shown)
        assert told is not None, option
        assert told[3] == f"SPECDECODE_{field.name.upper()}"
        unsaid = field.default is False or field.name in UNSAID
        assert unsaid or told[2].startswith("default: "), option


def test_defaults_in_the_help_of_up_are_those_of_the_settings() -> None:
    shown = help_of("up")
    for cls, name, option in (
        (TargetSettings, "model", "--model"),
        (TargetSettings, "port", "--target-port"),
        (DraftSettings, "port", "--draft-port"),
        (RouterSettings, "port", "--router-port"),
        (RouterSettings, "num_draft_tokens", "--num-draft-tokens"),
    ):
        default = cls.model_fields[name].default
        variable = f"SPECDECODE_{cls.section.upper()}_{name.upper()}"
        assert re.search(rf"{option} [A-Z]+ .*?\(default: {default}; env: {variable}", shown), option
    assert all(f"--{field.name.replace('_', '-')} " in shown for field in fields(StackFlags))


@pytest.mark.parametrize(
    "command", ["--help", "up --help", "generate --help", "generate hello", "chat", "status", "models --help"]
)
def test_no_command_waits_for_torch(command: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", *PROGRAM[1:], *command.split()],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=environment(SPECDECODE_ADDRESS="127.0.0.1:9"),
        check=False,
    )
    imported = {line.rsplit("|", 1)[1].strip() for line in ended.stderr.splitlines() if "|" in line}
    assert "specdecode.cli.app" in imported
    assert not imported & {"torch", "transformers", "tokenizers", "huggingface_hub"}
