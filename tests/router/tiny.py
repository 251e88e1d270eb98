"""Tiny tokenizers and models on disk, built from configurations in a second."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS = 0, 1
SPECIAL_TOKENS = ["<s>", "</s>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the stop string stops the text",
    "na\u00efve caf\u00e9 \u2014 \u0434\u043e\u0431\u0440\u044b\u0439 \u4f60\u597d\u4e16\u754c",
    "def add(a, b):\n    return a + b\n",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}<s>assistant\n"
)


def save_byte_level_tokenizer(path: Path, num_merges: int = 150) -> Path:
    """Every text can be said, bytes outside the merges one by one (as GPT-2, Llama 3, Qwen, SmolLM)."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=len(SPECIAL_TOKENS) + len(alphabet) + num_merges,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _save(tokenizer, path)


def save_byte_fallback_tokenizer(path: Path) -> Path:
    """Words with a leading mark, bytes for unknown characters (as Llama 2, Gemma, Phi-3)."""
    letters = sorted(set("\u2581abcdefghijklmnopqrstuvwxyz.,"))
    tokens = [*SPECIAL_TOKENS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pairs = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("s", "t")]
    tokens += ["".join(pair) for pair in pairs]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(Regex(" "), "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return _save(tokenizer, path)


def _save(tokenizer: Tokenizer, path: Path) -> Path:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    return path


def save_llama(path: Path, vocab_size: int, max_length: int = 256, seed: int = 0, layers: int = 2) -> Path:
    """A random-weight Llama beside a tokenizer that is already in `path`; float32."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)
    assert json.loads((path / "config.json").read_text())["model_type"] == "llama"
    return path
