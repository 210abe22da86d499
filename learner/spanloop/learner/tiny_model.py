"""A Hugging Face model folder small enough for tests and examples: Llama architecture, one token a word.

Place: stands where a real base model would: the learner trains LoRA on it (``hf_policy``), vLLM serves it. Made from a word
list and a seed, so nothing is downloaded; the same arguments give the same files. Its answers mean nothing until it is trained.

Token ids are those of the embedded policy's tokenizer (five specials, then the words), then one token a chat role. The
architecture is one for which ``AutoTokenizer`` takes tokenizer.json as it is (for Qwen2 it puts its own BPE rules in). The
chat template is ``<bos>``, each message as ``<role> WORDS`` (an answer ends with ``<eos>``), then ``<act>``.

    python -m spanloop.learner.tiny_model FOLDER look stop take-left take-right
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from spanloop.learner.tokenizer import BOS, EOS, PAD, SPECIALS, Tokenizer
from spanloop.schemas.errors import ConfigError, SpanloopError

__all__ = ["ROLES", "build_tiny_model"]

ROLES = ("<system>", "<user>", "<assistant>", "<tool>")
HEAD_SCALE = 0.08
"""Spread of the output head. LoRA leaves the head as it is, so it must be large enough for a sure answer (the largest logit
is about this times the hidden size) and small enough that the untrained model tries every word."""
TEMPLATE = (
    "{{ '<bos>' }}"
    "{% for message in messages %}"
    "{{ ' <' + (message.role if message.role in ['system', 'user', 'assistant', 'tool'] else 'user') + '> ' }}"
    "{% if message.content is string %}{{ message.content }}"
    "{% elif message.content %}{% for part in message.content %}{{ ' ' + (part.text or '') }}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ ' ' + call.function.name }}{% endfor %}"
    "{% if message.role == 'assistant' %}{{ ' <eos>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ ' <act>' }}{% endif %}"
)


def build_tiny_model(
    folder: Path,
    words: Sequence[str],
    seed: int = 0,
    *,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    context: int = 256,
) -> Path:
    """Write the model to ``folder`` and return it.

    Args:
        folder: New or empty.
        words: The vocabulary, without white space or the special words.
        seed: Of the random weights.
        hidden: Width; with ``heads`` it gives the head size, of which vLLM on a CPU takes 32, 64, 80, 96, 112, 128, ...
        layers: Of the transformer.
        heads: Of the attention; half as many for keys and values.
        context: Longest sequence in tokens.

    Raises:
        ConfigError: the folder has files, a word is unusable, or sizes do not fit.
    """
    vocabulary = (*Tokenizer(words).words, *ROLES)
    if len(set(vocabulary)) != len(vocabulary):
        raise ConfigError(f"the words {', '.join(ROLES)} are the chat roles' own")
    if hidden % heads or heads % 2:
        raise ConfigError(f"hidden = {hidden} must be a multiple of heads = {heads}, and heads even")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; a model is never overwritten: name a new folder")

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()

    tokenizer = _tokenizer(vocabulary, context)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() < 2:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            else:
                spread = HEAD_SCALE if name == "lm_head.weight" else _spread(name, parameter.shape[1])
                parameter.normal_(0.0, spread, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _spread(name: str, fan_in: int) -> float:
    return 1.0 if name.endswith("embed_tokens.weight") else fan_in**-0.5


def _tokenizer(vocabulary: Sequence[str], context: int):  # noqa: ANN202 - the class needs transformers
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Words(WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<unk>"))  # noqa: S106
    words.pre_tokenizer = WhitespaceSplit()
    words.add_special_tokens([AddedToken(w, lstrip=True, rstrip=True) for w in (*SPECIALS, *ROLES)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=context,
        pad_token="<pad>",  # noqa: S106
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, required=True)
@click.option("--seed", default=0, show_default=True, help="Of the random weights.")
@click.option("--hidden", default=128, show_default=True, help="Width of the model.")
@click.option("--layers", default=2, show_default=True, help="Of the transformer.")
@click.option("--context", default=256, show_default=True, help="Longest sequence in tokens.")
def main(folder: Path, words: tuple[str, ...], *, seed: int, hidden: int, layers: int, context: int) -> None:
    """Write an untrained model of WORDS to FOLDER, for tests and examples.

    Example: python -m spanloop.learner.tiny_model ./base look stop take-left take-right
    """
    try:
        build_tiny_model(folder, words, seed, hidden=hidden, layers=layers, context=context)
    except SpanloopError as exc:
        click.echo(f"error: {exc.message}", err=True)
        sys.exit(exc.exit_code)
    click.echo(f"{folder}: {len(words)} words, seed {seed}")


if __name__ == "__main__":
    main()
