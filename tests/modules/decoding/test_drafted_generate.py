"""`Artifact.generate`: the arguments of `generate` and its answers, token by token, or a refusal by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.export import Artifact, load_artifact, save_artifact
from draftsmith.modules import DecodeSettings, Request, Target, UserError, decode
from draftsmith.modules.target.loading.generation_defaults import TokenBiases
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.artifacts import TREE, heads
from support.tiers import some_long
from torch import Tensor
from transformers import GenerationConfig, SequenceBiasLogitsProcessor, TextIteratorStreamer

PROMPT = torch.tensor([[5, 9, 33, 71]])
PADDED = torch.tensor([[0, 0, 0, 5, 9, 33], [7, 21, 8, 64, 30, 12], [0, 40, 41, 42, 43, 44]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Medusa heads for a model in hand, in float64, so that no near-tie can flip."""
    target = Target(tiny_model(dtype=torch.float64), tiny_tokenizer(), name="in hand")
    folder = tmp_path_factory.mktemp("generate") / "artifact"
    save_artifact(folder, heads(target), target.identity, {}, TREE)
    return load_artifact(folder, target)


def native(artifact: Artifact, *given: Tensor, **settings: Any) -> Tensor:
    """The answer of the model's own `generate`."""
    with artifact.target.native() as model:
        tokens: Tensor = model.generate(*given, **settings)
    return tokens


def ends(artifact: Artifact, place: int) -> int:
    """The token at a place of the greedy answer to PROMPT, to end answers with."""
    return int(native(artifact, PROMPT, max_new_tokens=place + 1)[0, -1])


@pytest.mark.parametrize("settings", [
    {"max_new_tokens": 20}, {"max_length": 17}, {"max_new_tokens": 1}, {"max_new_tokens": 9, "eos_token_id": None},
    {"max_new_tokens": 20, "repetition_penalty": 1.4},
    {"generation_config": GenerationConfig(max_new_tokens=12, repetition_penalty=1.2)},
    {"max_new_tokens": 20, "do_sample": True, "top_k": 1, "temperature": 0.7},
    {"max_new_tokens": 6, "use_cache": False, "cache_implementation": "static", "logits_processor": None}, {},
], ids=str)
def test_one_prompt_is_answered_as_by_generate(artifact: Artifact, settings: dict[str, Any]) -> None:
    expected = native(artifact, PROMPT, **settings)
    for policy in ("static", "chain-2", "eagle2-8", "none"):
        found = artifact.generate(PROMPT, policy=policy, **settings)
        assert found.tolist() == expected.tolist()
        assert found.dtype == expected.dtype


def chosen(artifact: Artifact, count: int) -> list[int]:
    """The first tokens of the greedy answer to PROMPT, all different."""
    return list(dict.fromkeys(native(artifact, PROMPT, max_new_tokens=20)[0, 4:].tolist()))[:count]


@pytest.mark.parametrize("more", some_long([{"repetition_penalty": 1.3}, {}, {"do_sample": True, "top_k": 1}], 9),
                         ids=str)
@pytest.mark.parametrize("name", [
    "suppress_tokens", "bad_words_ids", "begin_suppress_tokens", "sequence_bias", "min_new_tokens", "min_length",
    "no_repeat_ngram_size", "forced_eos_token_id", "logits_processor"])
def test_tokens_are_made_likelier_or_ruled_out_as_by_generate(artifact: Artifact, name: str, more: dict[str, Any]
                                                              ) -> None:
    first, second, third = chosen(artifact, 3)
    # The answer would end at its second token.
    own = [SequenceBiasLogitsProcessor([[[third], 4.0]]), lambda text, scores: scores.scatter(1, text[:, -2:], -9.0)]
    settings = {"suppress_tokens": [first, third], "bad_words_ids": [[first], [second], [first, third]],
                "begin_suppress_tokens": [first], "min_new_tokens": 9, "min_length": 12,
                "sequence_bias": {(second,): 3.0, (first,): -50.0, (third, first): 2.0},
                "no_repeat_ngram_size": 1, "forced_eos_token_id": [third, 7], "logits_processor": own}
    given: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": second, "pad_token_id": 0, name: settings[name],
                             **more}
    if name == "no_repeat_ngram_size":
        given["eos_token_id"] = 2
    elif name == "forced_eos_token_id":
        given["max_new_tokens"] = 1
    elif name == "logits_processor":
        # In place of the call's own.
        given["sequence_bias"] = {(second, first): 5.0}
    expected = native(artifact, PROMPT, **given)
    plain = native(artifact, PROMPT, **{key: value for key, value in given.items() if key != name})
    # A repetition penalty leaves nothing that comes twice.
    same = name == "no_repeat_ngram_size" and "repetition_penalty" in more
    assert same or expected.tolist() != plain.tolist(), "the setting changes nothing here"
    for policy in ("static", "eagle2-8", "none"):
        assert artifact.generate(PROMPT, policy=policy, **given).tolist() == expected.tolist()
    batch = {**given, "input_ids": PADDED, "attention_mask": MASK}
    assert artifact.generate(**batch).tolist() == native(artifact, **batch).tolist()


@pytest.mark.parametrize("chunk", [4, 3])
def test_what_begins_no_answer_begins_none_after_a_prompt_in_pieces(artifact: Artifact, chunk: int) -> None:
    prompt = tuple(range(5, 14))
    first = decode(artifact.target, [Request(prompt, 0, 1)], DecodeSettings()).generations[0].tokens[0]
    settings = DecodeSettings(prefill_chunk=chunk, biases=TokenBiases(not_first=(first,)))
    found = decode(artifact.target, [Request(prompt, 0, 9)], settings).generations[0].tokens
    expected = native(artifact, torch.tensor([prompt]), begin_suppress_tokens=[first], max_new_tokens=9)
    assert list(found) == expected[0, len(prompt):].tolist()


def test_tokens_that_the_target_has_not_are_passed_over_or_refused_as_by_generate(artifact: Artifact) -> None:
    vocab_size = artifact.target.vocab_size
    for unknown in (vocab_size, -1):
        given: dict[str, Any] = {"suppress_tokens": [unknown], "begin_suppress_tokens": [unknown], "max_new_tokens": 9,
                                 "min_new_tokens": 3, "eos_token_id": [2, vocab_size]}
        assert artifact.generate(PROMPT, **given).tolist() == native(artifact, PROMPT, **given).tolist()
    with pytest.raises(UserError, match=f"names the token {vocab_size}, and the target has {vocab_size} tokens"):
        artifact.generate(PROMPT, sequence_bias={(vocab_size,): 1.0}, max_new_tokens=9)


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}, {"pad_token_id": 7}], ids=str)
@pytest.mark.parametrize("ended", [False, True])
def test_a_padded_batch_is_answered_as_by_generate(artifact: Artifact, settings: dict[str, Any], ended: bool) -> None:
    given: dict[str, Any] = {"input_ids": PADDED, "attention_mask": MASK, "max_new_tokens": 18, **settings}
    if ended:
        # The first token of the first answer and the fourth of the second end: rows are filled up.
        answers = native(artifact, eos_token_id=None, **given)[:, PADDED.shape[1]:]
        given["eos_token_id"] = [int(answers[1, 3]), int(answers[0, 0])]
    expected = native(artifact, **given)
    assert artifact.generate(**given).tolist() == expected.tolist()
    assert not ended or expected.shape[1] > PADDED.shape[1] + 1


def test_padding_is_found_without_a_mask(artifact: Artifact) -> None:
    given: dict[str, Any] = {"pad_token_id": 0, "max_new_tokens": 8}
    assert artifact.generate(PADDED, **given).tolist() == native(artifact, PADDED, **given).tolist()


def test_end_tokens_of_the_call_end_the_answer(artifact: Artifact) -> None:
    for place in (0, 2, 5):
        given: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": [ends(artifact, place), 3]}
        expected = native(artifact, PROMPT, **given)
        assert expected.shape[1] <= PROMPT.shape[1] + place + 1
        assert artifact.generate(PROMPT, **given).tolist() == expected.tolist()


@pytest.mark.parametrize("place", [0, 1, 4, 9])
def test_stop_texts_end_answers_as_by_generate(artifact: Artifact, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a text begins: one may begin in the prompt, and one that stands in the prompt alone ends nothing."""
    tokenizer, whole = artifact.target.tokenizer, native(artifact, PROMPT, max_new_tokens=20)[0].tolist()
    texts = [tokenizer.decode(whole[first : 5 + place]) for first in range(4 + place, 0, -1)]
    assert len(set(texts)) > 3
    for text in texts:
        for stops in (text, [tokenizer.decode(whole[:4]), text[1:] or text, "never there"]):
            given: dict[str, Any] = {"max_new_tokens": 20, "stop_strings": stops, "tokenizer": tokenizer}
            expected = native(artifact, PROMPT, **given)
            for policy in ("static", "none"):
                assert artifact.generate(PROMPT, policy=policy, **given).tolist() == expected.tolist()
    assert expected.shape[1] < len(whole)
    config = GenerationConfig(max_new_tokens=20, stop_strings=[texts[0]])
    # The target's own tokenizer needs no naming.
    assert artifact.generate(PROMPT, generation_config=config).tolist() == native(
        artifact, PROMPT, generation_config=config, tokenizer=tokenizer).tolist()
    # The model's own stop texts hold where a call names none.
    monkeypatch.setattr(artifact.target.model.generation_config, "stop_strings", [texts[0]])
    for settings in ({"max_new_tokens": 20}, {"generation_config": GenerationConfig(max_new_tokens=20)}):
        assert artifact.generate(PROMPT, **settings).tolist() == native(
            artifact, PROMPT, tokenizer=tokenizer, **settings).tolist()
    batch: dict[str, Any] = {"input_ids": PADDED, "attention_mask": MASK, **given}
    assert artifact.generate(**batch).tolist() == native(artifact, **batch).tolist()
    for wrong in (5, [3]):
        with pytest.raises(UserError, match="stop_strings must be a text or a list of texts, got "):
            artifact.generate(PROMPT, stop_strings=wrong)


@pytest.mark.parametrize("settings", [
    {"temperature": 1.4}, {"temperature": 0.8, "top_k": 7}, {"top_k": 0, "top_p": 0.6}, {"top_k": 0, "min_p": 0.3},
    {"top_k": 0, "repetition_penalty": 1.8}], ids=str)
def test_sampled_answers_have_generates_distribution(artifact: Artifact, settings: dict[str, Any]) -> None:
    rows, given = 3000, {"do_sample": True, "max_new_tokens": 1, **settings}
    torch.manual_seed(3)
    found = artifact.generate(PROMPT, num_return_sequences=rows, **given)
    assert found.shape == (rows, 5)
    scores = native(artifact, PROMPT, return_dict_in_generate=True, output_scores=True, **given).scores[0]
    exact_V = scores[0].double().softmax(-1)
    seen_V = torch.bincount(found[:, 4], minlength=len(exact_V)).double()
    assert not seen_V[exact_V == 0].any()
    # Five standard deviations for each token, and no less than a few draws for rare ones.
    assert ((seen_V - rows * exact_V).abs() <= 5 * (rows * exact_V).sqrt() + 5).all()


def test_torchs_seed_repeats_sampled_answers(artifact: Artifact) -> None:
    answers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(artifact.generate(PROMPT, do_sample=True, max_new_tokens=20).tolist())
    assert answers[0] == answers[1] != answers[2]


class Seen:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.got.append((tuple(value.shape), value.tolist()))

    def end(self) -> None:
        self.got.append("end")


def test_a_streamer_gets_what_generate_gives_it(artifact: Artifact) -> None:
    ours, theirs = Seen(), Seen()
    artifact.generate(PROMPT, max_new_tokens=15, streamer=ours)
    native(artifact, PROMPT, max_new_tokens=15, streamer=theirs)
    assert ours.got == theirs.got
    texts = TextIteratorStreamer(artifact.target.tokenizer, skip_prompt=True)
    answer = artifact.generate(PROMPT, max_new_tokens=15, streamer=texts)
    assert "".join(texts) == artifact.target.tokenizer.decode(answer[0, 4:])
    with pytest.raises(UserError, match="a streamer shows one answer, got 3 prompts"):
        artifact.generate(PADDED, attention_mask=MASK, max_new_tokens=3,
                          streamer=TextIteratorStreamer(artifact.target.tokenizer))


@pytest.mark.parametrize(("settings", "says"), [
    *(({name: value}, f"does not offer {name}=") for name, value in (
        ("num_beams", 2), ("max_time", 1.0), ("guidance_scale", 1.5))),
    ({"do_sample": True, "typical_p": 0.5}, "does not offer typical_p=0.5"),
    ({"return_dict_in_generate": True}, "does not offer return_dict_in_generate; leave it out"),
    ({"generation_config": GenerationConfig(num_beams=3)}, "does not offer num_beams=3"),
    *(({name: value}, f"does not offer {name}; leave it out, or call generate of the model itself") for name, value in (
        ("stopping_criteria", [1]), ("assistant_model", 1), ("past_key_values", 1),
        ("inputs_embeds", 1), ("prefix_allowed_tokens_fn", 1), ("position_ids", 1), ("custom_generate", 1),
        ("no_such_setting", 1))),
    ({"attention_mask": torch.tensor([[1, 1, 0, 1]])}, "padding or a gap after its first token"),
    ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "padding or a gap after its first token"),
    ({"attention_mask": torch.tensor([[0, 0, 0, 0]])}, "prompt 0 is empty"),
    ({"max_new_tokens": 100_000}, "the target's context holds 512"), ({"policy": "best"}, "there is no policy"),
], ids=lambda value: str(value)[:40])
def test_what_is_not_offered_is_refused_by_name(artifact: Artifact, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        artifact.generate(PROMPT, **{"max_new_tokens": 4, **settings} if "generation_config" not in settings
                          else settings)


def test_tokens_are_given_as_tensors_too(artifact: Artifact) -> None:
    first, second, _ = chosen(artifact, 3)
    given: dict[str, Any] = {"eos_token_id": torch.tensor([2, second]), "suppress_tokens": torch.tensor([first]),
                             "max_new_tokens": 12}
    assert artifact.generate(PROMPT, **given).tolist() == native(artifact, PROMPT, **given).tolist()


def test_a_checkpoints_own_sampling_is_taken_as_by_generate(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.float64)
    model.generation_config = GenerationConfig(repetition_penalty=1.5, max_new_tokens=14, eos_token_id=2)
    target = Target(model, tiny_tokenizer(), name="in hand")
    save_artifact(tmp_path / "artifact", heads(target), target.identity, {}, TREE)
    artifact = load_artifact(tmp_path / "artifact", target)
    assert artifact.generate(PROMPT).tolist() == native(artifact, PROMPT).tolist()


def test_a_reference_for_all_prompts_or_one_each_is_copied(artifact: Artifact) -> None:
    settings: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 20, "eos_token_id": None}
    expected = native(artifact, PADDED, **settings)
    texts = [artifact.target.tokenizer.decode(row[6:]) for row in expected]
    for reference in (texts, texts[0]):
        assert artifact.generate(PADDED, reference=reference, **settings).tolist() == expected.tolist()
    for wrong, says in ((texts[:2], "reference holds 2 texts for 3 prompts"), ([5, 6, 7], "reference must be a text")):
        with pytest.raises(UserError, match=says):
            artifact.generate(PADDED, reference=wrong, **settings)
    with pytest.raises(UserError, match=r"policy static copies from none; ask for static\+reference"):
        artifact.generate(PROMPT, max_new_tokens=4, reference="a", policy="static")
