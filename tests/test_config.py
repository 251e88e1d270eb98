"""Settings: who wins, what is refused and how that reads."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from specdecode.config import (
    DraftSettings,
    RouterSettings,
    ServiceSettings,
    TargetSettings,
    load_settings,
    read_settings,
)
from specdecode.errors import InvalidArgumentError

ALL = [TargetSettings, DraftSettings, RouterSettings]
Write = Callable[[str, str], str]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("SPECDECODE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def refusals(cls: type[ServiceSettings], *argv: str) -> dict[str, str]:
    with pytest.raises(InvalidArgumentError) as caught:
        read_settings(cls, argv)
    return {violation.field: violation.description for violation in caught.value.violations}


class TestPrecedence:
    @pytest.mark.parametrize("in_cli", [False, True])
    @pytest.mark.parametrize("in_env", [False, True])
    @pytest.mark.parametrize("in_file", [False, True])
    def test_command_line_over_environment_over_file_over_default(
        self, in_cli: bool, in_env: bool, in_file: bool, write: Write, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        argv = ["--config", write("c.toml", f"[target]\n{'max_running = 2' if in_file else ''}\n")]
        if in_cli:
            argv += ["--max-running", "4"]
        if in_env:
            monkeypatch.setenv("SPECDECODE_TARGET_MAX_RUNNING", "3")
        default = TargetSettings().max_running
        expected = 4 if in_cli else 3 if in_env else 2 if in_file else default
        assert read_settings(TargetSettings, argv).max_running == expected
        assert default not in (2, 3, 4)

    def test_sources_add_up(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECDECODE_TARGET_DTYPE", "float32")
        path = write("c.toml", "[target]\nkv_memory = '2GiB'\n")
        settings = read_settings(TargetSettings, ["--config", path, "--no-prefix-cache"])
        assert settings == TargetSettings(dtype="float32", kv_memory=2**31, prefix_cache=False)

    def test_the_file_may_come_from_the_environment_and_the_option_wins(
        self, write: Write, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SPECDECODE_CONFIG", write("a.toml", "[router]\nlease_tokens = 2\n"))
        assert read_settings(RouterSettings, []).lease_tokens == 2
        other = write("b.yaml", "router:\n  lease_tokens: 3\n")
        assert read_settings(RouterSettings, ["--config", other]).lease_tokens == 3

    def test_each_service_reads_its_own_section_and_its_own_variables(
        self, write: Write, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SPECDECODE_CONFIG", write("c.toml", "[target]\nport = 1\n[draft]\nport = 2\n"))
        monkeypatch.setenv("SPECDECODE_ROUTER_PORT", "3")
        assert [read_settings(cls, []).port for cls in ALL] == [1, 2, 3]

    def test_toml_and_yaml_say_the_same(self, write: Write) -> None:
        toml = write("c.toml", "[router]\ntargets = ['a:1', 'b:2']\ndraft = 'none'\ndrain_seconds = 1\n")
        text = "router:\n  targets: ['a:1', 'b:2']\n  draft: null\n  drain_seconds: 1\n"
        for path in (toml, write("c.yaml", text), write("c.YML", text)):
            settings = read_settings(RouterSettings, ["--config", path])
            assert settings == RouterSettings(targets=("a:1", "b:2"), draft=None, drain_seconds=1.0)

    def test_construction_reads_arguments_alone(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECDECODE_TARGET_PORT", "1")
        monkeypatch.setenv("SPECDECODE_CONFIG", write("c.toml", "[target]\nmax_running = 2\n"))
        assert TargetSettings(port=7).port == 7
        assert TargetSettings() == TargetSettings.model_construct()

    @pytest.mark.parametrize("cls", ALL)
    def test_settings_can_not_be_changed(self, cls: type[ServiceSettings]) -> None:
        with pytest.raises(ValidationError):
            cls().log_level = "debug"  # type: ignore[misc]


class TestValues:
    @pytest.mark.parametrize(
        ("text", "size"), [("512MiB", 2**29), ("2GiB", 2**31), ("2 gib", 2**31), ("3000000", 3_000_000)]
    )
    def test_sizes(self, text: str, size: int) -> None:
        assert read_settings(TargetSettings, ["--kv-memory", text]).kv_memory == size

    def test_none_takes_a_value_back(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write("c.toml", "[draft]\nkv_memory = '1GiB'\nmodel = 'x'\nnum_blocks = 8\n")
        monkeypatch.setenv("SPECDECODE_DRAFT_MODEL", "none")
        argv = ["--config", path, "--kv-memory", "none", "--num-blocks", "None"]
        assert read_settings(DraftSettings, argv) == DraftSettings()

    def test_an_empty_variable_counts_as_unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECDECODE_TARGET_PORT", "")
        monkeypatch.setenv("SPECDECODE_CONFIG", "")
        assert read_settings(TargetSettings, []) == TargetSettings()

    @pytest.mark.parametrize(
        "argv", [["--targets", "a:1, [::1]:2"], ["--targets", "a:1", "--targets", "[::1]:2"]]
    )
    def test_targets_by_commas_or_repeated(self, argv: list[str]) -> None:
        assert read_settings(RouterSettings, argv).targets == ("a:1", "[::1]:2")

    def test_switches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECDECODE_TARGET_TRUST_DRAFT", "false")
        assert not read_settings(TargetSettings, []).trust_draft
        assert read_settings(TargetSettings, ["--trust-draft"]).trust_draft
        assert not read_settings(TargetSettings, ["--no-prefix-cache"]).prefix_cache

    def test_the_defaults_of_the_three_services_fit_together(self) -> None:
        router, target, draft = RouterSettings(), TargetSettings(), DraftSettings()
        assert router.targets == (f"{target.host}:{target.port}",)
        assert router.draft == f"{draft.host}:{draft.port}"
        assert router.model == target.model
        assert router.max_prompt_bytes < router.max_message_bytes


class TestRefusals:
    @pytest.mark.parametrize(
        ("cls", "option", "value", "allowed"),
        [
            (TargetSettings, "--port", "65536", "0 to 65535"),
            (TargetSettings, "--port", "-1", "0 to 65535"),
            (TargetSettings, "--port", "http", "0 to 65535"),
            (TargetSettings, "--max-running", "0", "1 to 65536 sequences"),
            (TargetSettings, "--max-tokens-in-flight", "32", "33 to 262144 tokens"),
            (TargetSettings, "--kv-memory", "12 bananas", "1MiB to 64TiB"),
            (TargetSettings, "--kv-memory", "1023KiB", "1MiB to 64TiB"),
            (TargetSettings, "--kv-memory-fraction", "nan", "0.01 to 0.95"),
            (TargetSettings, "--kv-memory-fraction", "1", "0.01 to 0.95"),
            (TargetSettings, "--dtype", "float8", "'auto', 'float32', 'bfloat16' or 'float16'"),
            (TargetSettings, "--device", "tpu", "'auto', 'cpu' or 'cuda'"),
            (TargetSettings, "--drain-seconds", "inf", "0 to 3600 seconds"),
            (TargetSettings, "--log-level", "loud", "'debug', 'info', 'warning' or 'error'"),
            (DraftSettings, "--top-k", "65", "1 to 64 tokens"),
            (DraftSettings, "--max-draft-tokens", "33", "1 to 32 tokens"),
            (DraftSettings, "--ngram-match", "first", "'earliest' or 'latest'"),
            (RouterSettings, "--num-draft-tokens", "33", "0 to 32 tokens"),
            (RouterSettings, "--targets", "a:1,a:1", "distinct host:port"),
            (RouterSettings, "--targets", "a:1,,b:2", "distinct host:port"),
            (RouterSettings, "--targets", "a", "distinct host:port"),
            (RouterSettings, "--draft", "a:0", "one host:port, or none"),
            (RouterSettings, "--draft", "a:65536", "one host:port, or none"),
        ],
    )
    def test_a_wrong_value_is_named_with_its_range(
        self, cls: type[ServiceSettings], option: str, value: str, allowed: str
    ) -> None:
        [(field, description)] = refusals(cls, f"{option}={value}").items()
        assert field == option
        assert repr(value) in description
        assert allowed in description

    def test_a_refusal_names_the_source_the_value_came_from(
        self, write: Write, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write("c.toml", "[target]\nblock_size = 0\nmax_waiting = -1\nport = -1\n")
        monkeypatch.setenv("SPECDECODE_TARGET_MAX_WAITING", "-2")
        monkeypatch.setenv("SPECDECODE_TARGET_PORT", "-2")
        refused = refusals(TargetSettings, "--config", path, "--port", "-3")
        assert set(refused) == {"--port", "SPECDECODE_TARGET_MAX_WAITING", f"{path} [target] block_size"}
        assert "'-3' is refused" in refused["--port"]

    def test_unknown_options(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "--max-runing=3" in refusals(TargetSettings, "--max-runing=3")["command line"]
        path = write("c.toml", "[target]\nmax_runing = 3\n[draft]\nmax_runing = 3\n")
        assert set(refusals(TargetSettings, "--config", path)) == {f"{path} [target] max_runing"}
        path = write("d.toml", "[targets]\nmax_running = 3\n")
        assert set(refusals(TargetSettings, "--config", path)) == {f"{path} [targets]"}
        monkeypatch.setenv("SPECDECODE_TARGET_MAX_RUNING", "3")
        assert set(refusals(TargetSettings)) == {"SPECDECODE_TARGET_MAX_RUNING"}

    def test_abbreviations_are_unknown(self) -> None:
        assert "--max-run" in refusals(TargetSettings, "--max-run", "3")["command line"]

    def test_variables_that_kubernetes_sets_for_its_services_are_passed_over(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in {
            "SERVICE_HOST": "10.0.0.1",
            "SERVICE_PORT": "50052",
            "SERVICE_PORT_GRPC": "50052",
            "PORT": "tcp://10.0.0.1:50052",
            "PORT_50052_TCP": "tcp://10.0.0.1:50052",
            "PORT_50052_TCP_ADDR": "10.0.0.1",
        }.items():
            monkeypatch.setenv(f"SPECDECODE_TARGET_{name}", value)
        assert read_settings(TargetSettings, []) == TargetSettings()

    def test_the_longest_match_is_not_below_the_shortest(self) -> None:
        assert refusals(DraftSettings, "--ngram-min", "6") == {
            "options": "ngram_min 6 is above ngram_max 5",
        }

    @pytest.mark.parametrize(
        ("name", "text", "part"),
        [
            ("absent.toml", None, "can't be read: No such file"),
            ("c.json", "{}", "neither .toml nor .yaml nor .yml"),
            ("c.toml", "[target\n", "at line 1"),
            ("c.yaml", "target: [", "line 1"),
            ("c.yaml", "- target", "no sections"),
        ],
    )
    def test_files_that_can_not_be_read(
        self, name: str, text: str | None, part: str, tmp_path: Path, write: Write
    ) -> None:
        path = write(name, text) if text is not None else str(tmp_path / name)
        [(field, description)] = refusals(TargetSettings, "--config", path).items()
        assert field == "--config"
        assert path in description
        assert part in description

    def test_a_section_is_a_table(self, write: Write) -> None:
        path = write("c.yaml", "target: 3\n")
        assert set(refusals(TargetSettings, "--config", path)) == {f"{path} [target]"}

    def test_one_line_a_problem_and_exit_code_2(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            load_settings(RouterSettings, ["--port", "x", "--targets", "y", "--num-draft-tokens", "40"])
        assert caught.value.code == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.splitlines() == [
            "python -m router: --port: 'x' is refused; allowed: 0 to 65535",
            "python -m router: --targets: 'y' is refused; allowed: distinct host:port, comma between",
            "python -m router: --num-draft-tokens: '40' is refused; allowed: 0 to 32 tokens",
        ]


@pytest.mark.parametrize("cls", ALL)
class TestHelp:
    def text(self, cls: type[ServiceSettings], capsys: pytest.CaptureFixture[str]) -> str:
        with pytest.raises(SystemExit) as caught:
            load_settings(cls, ["--help"])
        assert caught.value.code == 0
        return " ".join(capsys.readouterr().out.split())

    def test_every_option_with_what_it_is_its_range_and_its_default(
        self, cls: type[ServiceSettings], capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = self.text(cls, capsys)
        for name, field in cls.model_fields.items():
            option = name.replace("_", "-")
            start = re.compile(rf" --{option},? ").search(text, text.index("options:")).start()
            assert field.description is not None
            assert f" {field.description} (default: " in text[start:]

    def test_the_other_sources(self, cls: type[ServiceSettings], capsys: pytest.CaptureFixture[str]) -> None:
        text = self.text(cls, capsys)
        assert f"SPECDECODE_{cls.section.upper()}_NAME" in text
        assert f"[{cls.section}]" in text
        assert "SPECDECODE_CONFIG" in text


def test_help_shows_sizes_and_addresses_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    text = TestHelp().text(RouterSettings, capsys)
    assert "largest prompt; 1KiB to 1GiB, written as 512MiB or 2GiB (default: 4MiB)" in text
    assert "(default: 127.0.0.1:50052)" in text
