"""Options of the commands by file and by environment, beside the command line."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.main import get_command
from typer.testing import CliRunner

from specdecode.cli.app import app
from specdecode.config import COMMANDS, RouterSettings, read_settings
from tests.cli.running import run

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDECODE_CONFIG", raising=False)


def invoke(*args: str, **variables: str) -> Result:
    return RUNNER.invoke(app, args, env={"COLUMNS": "200", **variables}, prog_name="specdecode")


def file(tmp_path: Path, text: str, name: str = "options.toml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


PLAN = '[plan]\nalphas = "0.80,0.72,0.66,0.60,0.55"\ndraft-cost = 0.1\n'


class TestPlan:
    def test_the_file_the_environment_and_the_command_line_in_this_order(self, tmp_path: Path) -> None:
        path = file(tmp_path, PLAN)
        assert "best: γ = 4, 2.13 times" in invoke("plan", "--config", path).output
        assert "best: γ = 4, 2.13 times" in invoke("plan", SPECDECODE_CONFIG=path).output
        cheaper = {"SPECDECODE_PLAN_DRAFT_COST": "0.01"}
        assert "best: γ = 5, 2.96 times" in invoke("plan", "--config", path, **cheaper).output
        given = ("plan", "--config", path, "--draft-cost", "0.1")
        assert "best: γ = 4, 2.13 times" in invoke(*given, **cheaper).output

    def test_yaml_reads_the_same(self, tmp_path: Path) -> None:
        path = file(tmp_path, "plan:\n  alphas: 0.8,0.72\n  draft_cost: 0.1\n  tp: null\n", "options.yaml")
        assert "best: γ = 2, 1.98 times" in invoke("plan", "--config", path).output


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[generate]\nmax_tokens = 0\n", "'--max-tokens': '0' is refused; allowed: 1 to"),
        ("[generate]\nmax_tokens = 1.5\n", "'--max-tokens': '1.5' is refused"),
        ("[generate]\nmax_tokens = true\n", "'--max-tokens': 'True' is refused; allowed: 1 to"),
        ("[generate]\nstop = ''\n", "'--stop': '' is refused; allowed: 1 to 256 characters"),
        ("[generate]\nstop = {a = 1}\n", "[generate] stop: a value, or a list of values, is needed"),
        ("[generate]\nmax_token = 1\n", "[generate] max_token: unknown option; known are chat"),
        ("[generate]\nprompt = 'x'\n", "[generate] prompt: unknown option"),
        (
            "[client]\nmax_tokens = 1\n",
            "[client] max_tokens: unknown option; known are address, api_key, timeout",
        ),
        ("[generat]\nmax_tokens = 1\n", "[generat]: unknown section; known are target, draft, router"),
        ("generate = 3\n", "[generate]: a section with options is needed"),
        ("[generate\n", "options.toml"),
    ],
)
def test_a_wrong_file_is_refused_with_the_option_and_its_range(tmp_path: Path, text: str, told: str) -> None:
    path = file(tmp_path, text)
    refused = invoke("generate", "--config", path, "--address", "127.0.0.1:9", "Hi")
    assert refused.exit_code == 2
    assert told.replace("known are chat", "known are address") in " ".join(refused.output.split())


def test_generate_takes_everything_from_the_file(router: str, tmp_path: Path) -> None:
    text = (
        f'[client]\naddress = "{router}"\n[generate]\ntemperature = 0\nmax_tokens = 4\nignore_eos = true\n'
        'stop_token_id = [5, 6]\nlogit_bias = "7=-100"\nspeculation = "off"\njson = true\n'
        "[router]\nnum_draft_tokens = 3\n"
    )
    path = file(tmp_path, text)
    answer = run("generate", "--config", path, "The sea")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["usage"]["num_plain"] == found["usage"]["num_emitted"] <= 4
    assert run("status", "--config", path).returncode == 0
    assert run("policy", "show", "--config", path).returncode == 0
    # The services read the same file.
    assert read_settings(RouterSettings, ["--config", path]).num_draft_tokens == 3


def test_simulate_takes_file_environment_and_command_line(tmp_path: Path) -> None:
    path = file(tmp_path, "[simulate]\nrate = 5\nrequests = 12\ncompare = 'off'\njson = true\n")

    def simulated(*args: str, **variables: str) -> dict[str, object]:
        answer = run("simulate", "--config", path, *args, **variables)
        assert answer.returncode == 0, answer.stderr
        found: dict[str, object] = json.loads(answer.stdout)
        return found

    assert simulated()["seed"] == 0
    assert simulated(SPECDECODE_SIMULATE_SEED="4")["seed"] == 4
    assert simulated("--seed", "5", SPECDECODE_SIMULATE_SEED="4")["seed"] == 5
    wrong = run("simulate", "--config", file(tmp_path, "[simulate]\nrat = 5\n"))
    assert wrong.returncode == 2
    assert "--rat" in wrong.stderr


def test_sections_are_the_commands() -> None:
    names = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    assert names - {"up", "demo"} == set(COMMANDS)


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"simulate"}))
def test_every_option_has_a_variable(name: str) -> None:
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    options = [one for one in command.params if one.param_type_name == "option" and one.name != "help"]
    assert options
    assert [one.name for one in options if not one.envvar] == []
    variables = [one.envvar for one in options]
    assert len(set(variables)) == len(variables)
