"""The same chat through OpenAI's own package."""

from __future__ import annotations

import sys

import openai


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Why is the sky blue?"}],
        max_tokens=64,
        temperature=0.7,
        seed=7,
        stream=True,
        extra_body={"speculative_decoding": {"mode": "auto"}},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if not chunk.choices:
            told = (chunk.model_extra or {})["metrics"]["speculative_decoding"]
            print(
                f"\n{told['num_emitted']} tokens in {told['num_rounds']} rounds; "
                f"{told['num_accepted']} were drafted"
            )


if __name__ == "__main__":
    main()
