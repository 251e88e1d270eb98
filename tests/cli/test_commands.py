"""`generate`, `chat` and `status` against three real services."""

from __future__ import annotations

import json
import re
import signal
import sys
from typing import Any

import pytest

from tests.cli.running import DEADLINE, program, run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="starts services"),
    pytest.mark.timeout(3 * DEADLINE),
]

PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown fox"
GREEDY = ("--temperature=0", "--ignore-eos", "--max-tokens=24")


def generate(router: str, *options: str, prompt: str = PROMPT) -> tuple[str, str]:
    """Stdout and stderr of a success."""
    ended = run("generate", prompt, f"--address={router}", *options)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr


def choices(router: str, *options: str) -> list[dict[str, Any]]:
    """What --json tells of each text."""
    stdout, stderr = generate(router, "--json", *options)
    assert stderr == ""
    return [json.loads(line) for line in stdout.splitlines()]


def test_text_goes_to_stdout_and_one_line_about_it_to_stderr(router: str) -> None:
    (choice,) = choices(router, *GREEDY)
    stdout, stderr = generate(router, *GREEDY)
    assert stdout == choice["text"] + "\n"
    assert re.fullmatch(r"24 tokens in \d+ rounds · .* · \d+\.\d tok/s · ended by length\n", stderr)


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_json_accounts_for_every_token_and_round(router: str, drafter: str) -> None:
    (choice,) = choices(router, *GREEDY, f"--drafter={drafter}", "--num-draft-tokens=3", "--speculation=on")
    usage, rounds, origins = (
        choice["usage"],
        choice["rounds"],
        [token["origin"] for token in choice["tokens"]],
    )
    assert choice["finish_reason"] == "length"
    assert usage["num_emitted"] == len(origins) == 24
    for origin in ("accepted", "bonus", "recovered", "plain"):
        assert usage[f"num_{origin}"] == origins.count(origin)
    assert usage["num_rounds"] == len(rounds)
    assert usage["num_drafted"] == sum(told["num_drafted"] for told in rounds) > 0
    assert usage["num_accepted"] == sum(told["num_accepted"] for told in rounds)
    assert {told["drafter"] for told in rounds if told["num_drafted"]} == {drafter}


def test_the_text_does_not_depend_on_speculation(router: str) -> None:
    sampled = ("--temperature=0.9", "--seed=11", "--top-p=0.9", "--ignore-eos", "--max-tokens=120")
    for options in (GREEDY, sampled):
        (off,) = choices(router, *options, "--speculation=off")
        assert off["usage"]["num_drafted"] == 0
        for drafter in ("ngram", "model"):
            (on,) = choices(router, *options, "--speculation=on", f"--drafter={drafter}")
            assert on["usage"]["num_drafted"] > 0
            assert (on["text"], [token["id"] for token in on["tokens"]]) == (
                off["text"],
                [token["id"] for token in off["tokens"]],
            )


def test_options_reach_the_router(router: str) -> None:
    (plain,) = choices(router, *GREEDY)
    ids = [token["id"] for token in plain["tokens"]]
    banned, wanted = ids[0], (ids[0] + 1) % 300 + 2
    (biased,) = choices(router, *GREEDY, f"--logit-bias={banned}=-100", f"--logit-bias={wanted}=100")
    assert {token["id"] for token in biased["tokens"]} == {wanted}
    (stopped,) = choices(router, *GREEDY, f"--stop-token-id={ids[3]}")
    assert stopped["finish_reason"] == "stop"
    assert [token["id"] for token in stopped["tokens"]] == ids[: ids.index(ids[3]) + 1]
    word = plain["text"][4:7]
    (cut,) = choices(router, *GREEDY, f"--stop={word}")
    assert cut["stop"] == word
    assert cut["text"] == plain["text"][: plain["text"].index(word)]
    (told,) = choices(router, *GREEDY, "--logprobs=2")
    assert [token["top"][0][0] for token in told["tokens"]] == ids
    assert all(token["rank"] == 1 for token in told["tokens"])


def test_several_texts_are_told_apart(router: str) -> None:
    several = choices(router, "--n=3", "--seed=5", "--max-tokens=8", "--ignore-eos")
    assert sorted(choice["choice"] for choice in several) == [0, 1, 2]
    assert len({choice["text"] for choice in several}) > 1
    stdout, stderr = generate(router, "--n=3", "--seed=5", "--max-tokens=8", "--ignore-eos")
    assert stdout == "".join(choice["text"] + "\n" for choice in several)
    assert [line for line in stderr.splitlines() if line.startswith("choice")] == [
        "choice 0",
        "choice 1",
        "choice 2",
    ]
    assert "24 tokens in" in stderr


def test_rounds_and_tokens_are_shown_beside_the_text(router: str) -> None:
    (choice,) = choices(router, *GREEDY, "--drafter=ngram")
    stdout, stderr = generate(router, *GREEDY, "--drafter=ngram", "--rounds", "--logprobs=1")
    assert stdout == choice["text"] + "\n"
    drafted = [told for told in choice["rounds"] if told["num_drafted"]]
    rows = re.findall(r"^ *(\d+) +(\d+) +(\d+) +(bonus|recovered) .* ngram *$", stderr, re.MULTILINE)
    assert [(int(i), int(d), int(a), origin) for i, d, a, origin in rows] == [
        (told["index"], told["num_drafted"], told["num_accepted"], told["last_origin"]) for told in drafted
    ]
    assert len(re.findall(r"^ *\d+ +\d+ +(?:accepted|bonus|recovered|plain) +-", stderr, re.MULTILINE)) == 24


def test_a_prompt_can_come_from_standard_input(router: str) -> None:
    piped = run("generate", "-", f"--address={router}", *GREEDY, text=PROMPT)
    assert piped.stdout == generate(router, *GREEDY)[0]


def test_options_can_come_from_the_environment(router: str) -> None:
    variables = {
        "SPECDECODE_ADDRESS": router,
        "SPECDECODE_TEMPERATURE": "0",
        "SPECDECODE_IGNORE_EOS": "1",
        "SPECDECODE_MAX_TOKENS": "24",
    }
    assert run("generate", PROMPT, **variables).stdout == generate(router, *GREEDY)[0]


def test_a_refusal_of_the_router_is_its_message_and_names_the_field(router: str) -> None:
    refused = run("generate", PROMPT, f"--address={router}", "--max-tokens=100000")
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr.startswith("error: sampling.max_tokens: 100000 is outside 1 to ")
    conflicting = run("generate", PROMPT, f"--address={router}", "--method=greedy")
    assert conflicting.returncode == 1
    assert conflicting.stderr == "error: speculation.method: greedy needs temperature 0\n"


def test_a_request_that_takes_too_long_is_given_up(router: str) -> None:
    late = run(
        "generate", PROMPT, f"--address={router}", "--timeout=0.02", "--ignore-eos", "--max-tokens=4000"
    )
    assert late.returncode == 1
    assert late.stderr.startswith("error: ")


def test_status_shows_one_row_a_replica(router: str) -> None:
    shown = run("status", f"--address={router}").stdout
    assert re.search(r"^ *target +127\.0\.0\.1:\d+ +up +model\w* +float32 cpu", shown, re.MULTILINE)
    assert re.search(r"^ *draft +127\.0\.0\.1:\d+ +up +model\w* +float32 cpu", shown, re.MULTILINE)
    assert re.search(r"^ *127\.0\.0\.1:\d+ .*ngram, model", shown, re.MULTILINE)


def test_piped_output_has_no_control_characters(router: str) -> None:
    for command in (["generate", PROMPT, *GREEDY, "--rounds", "--logprobs=2"], ["status"]):
        ended = run(*command, f"--address={router}")
        about = ended.stderr if command[0] == "generate" else ended.stdout
        assert about
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", about)


def chat(router: str, *lines: str) -> list[str]:
    """Replies to the lines, one after another."""
    options = (f"--address={router}", "--temperature=0", "--ignore-eos", "--max-tokens=8", "--stop=\n")
    talked = run("chat", *options, text="".join(f"{line}\n" for line in lines))
    assert talked.returncode == 0, talked.stderr
    return talked.stdout.splitlines()


def test_chat_remembers_until_it_is_reset(router: str) -> None:
    first, second, third, fourth = chat(router, "hello", "hello", "/reset", "hello", "hello", "/exit", "lost")
    assert (first, second) == (third, fourth)
    assert first != second


def test_chat_tells_a_wrong_command_and_goes_on(router: str) -> None:
    talked = run("chat", f"--address={router}", "--max-tokens=4", text="/forget\n/exit\n")
    assert talked.returncode == 0
    assert "no command /forget" in talked.stderr


def test_an_interrupt_ends_the_reply_and_not_the_conversation(router: str) -> None:
    options = (f"--address={router}", "--temperature=0", "--ignore-eos", "--logit-bias=200=0")
    with program("chat", *options, "--max-tokens=3900", "--stop-token-id=0") as talking:
        talking.wait_for("Ctrl-C interrupts")
        talking.type("hello")
        talking.wait_for(".")
        talking.signal(signal.SIGINT)
        talking.wait_for("interrupted$")
        talking.type("/exit")
        assert talking.end() == 0
