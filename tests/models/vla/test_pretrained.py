"""The adapters around π0, vision-language models and token actions: against transformers, and against formulas."""

import copy
import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policies import vla_policy
from pretrained_models import OTHERS, PALIGEMMA, PI0, PROPRIO, STREAMS, observations
from tensordict import TensorDict
from torch.distributions import Normal

from deft import PPO, VLAPolicy, load_vla_model, schema
from deft.config.algorithm_settings import PPOSettings
from deft.config.settings import DatasetPolicyConfig
from deft.errors import InputError
from deft.models.flow_chain import draw_chain
from deft.models.vla.openvla import BINS, ActionTokens, TokenVLA
from deft.models.vla.pi0 import Pi0VLA
from deft.models.vla.pretrained import ImagePreprocessor, InstructionTokenizer, read_statistics
from deft.models.vla.streams import Statistics
from deft.models.vla.vlm import VisionLanguageVLA


def seeded(build: Any, **keywords: Any) -> Any:
    torch.manual_seed(0)
    return build(**keywords)


@pytest.fixture(scope="module")
def pi0() -> Pi0VLA:
    return seeded(Pi0VLA, architecture=PI0, **STREAMS, **PROPRIO)


@pytest.fixture(scope="module")
def vlm() -> VisionLanguageVLA:
    return seeded(VisionLanguageVLA, architecture=PALIGEMMA, **STREAMS, **PROPRIO)


@pytest.fixture(scope="module")
def openvla() -> TokenVLA:
    return seeded(TokenVLA, architecture=PALIGEMMA, **STREAMS)


@pytest.fixture(scope="module", params=["pi0", "vlm", "openvla"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def acted(model: Any, batch: int = 3) -> tuple[VLAPolicy, TensorDict]:
    policy = VLAPolicy(model)
    td = TensorDict({schema.OBSERVATION: observations(batch)}, [batch])
    with torch.no_grad():
        policy.act(td)
    return policy, td


# ---------------------------------------------------------------------------------------------------------- all of them


def test_an_action_is_scored_as_it_was_drawn(model: Any) -> None:
    policy, td = acted(model)
    assert td[schema.ACTION].shape == (3, 2, 3)
    scored = policy.evaluate_actions(td)
    torch.testing.assert_close(scored["log_prob"], td[schema.LOG_PROB], rtol=0, atol=1e-4)
    torch.testing.assert_close(scored["value"], td[schema.VALUE])
    # The same rows in a smaller batch: what stands beside a row changes nothing.
    one = policy.evaluate_actions(td[1:2])
    torch.testing.assert_close(one["log_prob"], td[schema.LOG_PROB][1:2], rtol=0, atol=1e-4)
    # By steps of the denoising, steps of the chunk, or tokens: the parts of the same sum.
    policy.reports_tokens = True
    parts = policy.evaluate_actions(td)["token_log_prob"]
    assert parts.shape == (3, {"Pi0VLA": 3, "VisionLanguageVLA": 2, "TokenVLA": 6}[policy.model_name])
    torch.testing.assert_close(parts.sum(1), scored["log_prob"])


def test_the_words_are_read(model: Any) -> None:
    policy, td = acted(model)
    other = td.clone()
    other[schema.OBSERVATION, "instruction"] = td[schema.OBSERVATION, "instruction"].roll(1, 0)
    first, second = (policy.evaluate_actions(one)["log_prob"] for one in (td, other))
    assert bool(((first - second).abs() > 1e-6).all())


def test_the_likeliest_action_is_always_the_same(model: Any) -> None:
    """A flow's is denoised from drawn noise: the same from the same noise."""
    policy = VLAPolicy(model)
    td = TensorDict({schema.OBSERVATION: observations()}, [3])

    def act() -> torch.Tensor:
        with torch.no_grad():
            return policy.act(td.clone(), deterministic=True)[schema.ACTION]

    torch.manual_seed(0)
    first, second = act(), act()
    torch.manual_seed(0)
    assert torch.equal(act(), first)
    is_flow = policy.model_name == "Pi0VLA"
    assert torch.equal(first, second) == (not is_flow)
    assert policy.action_selection(deterministic=True) == ("sampled noise" if is_flow else "mode")


def test_padded_dims_enter_nothing(model: Any) -> None:
    policy = VLAPolicy(model)
    mask = torch.tensor([True, True, False]).expand(3, -1)
    td = TensorDict({schema.OBSERVATION: observations(), schema.ACTION_MASK: mask}, [3])
    with torch.no_grad():
        policy.act(td)
    assert bool((td[schema.ACTION][..., 2] == 0).all())
    masked = policy.evaluate_actions(td)
    torch.testing.assert_close(masked["log_prob"], td[schema.LOG_PROB], rtol=0, atol=1e-4)
    whole = policy.evaluate_actions(td.exclude(schema.ACTION_MASK))
    assert bool((masked["entropy"] != whole["entropy"]).all())


def test_ppo_makes_a_rewarded_action_likelier(model: Any) -> None:
    """One update on a rollout in which the first environment's action is good and the others' are bad."""
    policy, td = acted(copy.deepcopy(model))
    good = torch.tensor([1.0, -1.0, -1.0])
    rollout = td.clone().unsqueeze(0)  # [1, 3]
    rollout[schema.POLICY_VERSION] = torch.zeros(1, 3, dtype=torch.int64)
    done = torch.ones(1, 3, dtype=torch.bool)
    zeros = torch.zeros(1, 3)
    rollout[schema.NEXT] = TensorDict(
        {
            schema.REWARD: good.unsqueeze(0),
            schema.TERMINATED: done,
            schema.TRUNCATED: ~done,
            schema.VALUE: zeros,
        },
        [1, 3],
    )
    settings = PPOSettings(n_epochs=2, batch_size=3, learning_rate=3e-4, entropy_coef=0.0, max_grad_norm=None)
    before = policy.evaluate_actions(td)["log_prob"].detach()
    metrics = PPO(policy, settings).update(iter([rollout]))
    after = policy.evaluate_actions(td)["log_prob"].detach()
    assert float(after[0] - before[0]) > 0
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in metrics.values())


def test_imitation_brings_the_demonstrated_actions_closer(model: Any) -> None:
    learner = copy.deepcopy(model)
    seen = observations()
    actions = torch.tensor([0.5, -0.5, 0.25]).expand(3, 2, 3)
    optimizer = torch.optim.Adam([p for p in learner.parameters() if p.requires_grad], 3e-3)
    losses = []
    for _ in range(12):
        torch.manual_seed(1)  # the same noise and times, so that losses are comparable
        loss = learner.imitation_loss(seen, actions)
        assert loss.shape == (3,)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        losses.append(float(loss.detach().mean()))
    assert losses[-1] < 0.8 * losses[0] if losses[0] > 0 else losses[-1] < losses[0]
    step_mask = torch.tensor([[True, False]] * 3)
    torch.manual_seed(1)
    first = learner.imitation_loss(seen, actions, step_mask)
    torch.manual_seed(1)
    changed = actions.clone()
    changed[:, 1] = -0.9  # a step that is not real
    torch.testing.assert_close(learner.imitation_loss(seen, changed, step_mask), first)


# ------------------------------------------------------------------------------------------------------------------- π0


def test_pi0_denoises_as_transformers_does(pi0: Pi0VLA) -> None:
    seen, noise = observations(), torch.randn(3, 4, 6)
    with torch.no_grad():
        expected = pi0.backbone.sample_actions(**pi0.inputs(seen), noise=noise.clone(), num_steps=3)
        prefix, state = pi0._read(seen)
        chain, _ = draw_chain(pi0._velocity(prefix, state), noise, pi0.deviation, deterministic=True)
    torch.testing.assert_close(chain[:, -1], expected, rtol=0, atol=1e-5)


def test_pi0_matches_the_flow_loss_of_transformers(pi0: Pi0VLA) -> None:
    """Over the whole chunk and all dims their loss is the mean of ours."""
    from deft.models.flow_chain import flow_matching_error

    seen = observations()
    actions, noise, time = torch.randn(3, 4, 6), torch.randn(3, 4, 6), torch.tensor([0.1, 0.5, 0.9])
    with torch.no_grad():
        expected = pi0.backbone(**pi0.inputs(seen), actions=actions, noise=noise, timestep=time).loss
        prefix, state = pi0._read(seen)
        found = flow_matching_error(pi0._velocity(prefix, state), actions, noise, time)
    torch.testing.assert_close(found.mean(), expected, rtol=0, atol=1e-5)


def test_the_gradient_of_pi0_reaches_the_dims_that_are_not_executed(pi0: Pi0VLA) -> None:
    """The executed dims of a step read all dims of the step before: their velocity is part of the log-prob."""
    policy, td = acted(copy.deepcopy(pi0))
    chain = td[schema.SAMPLE, schema.CHAIN]
    policy.evaluate_actions(td)["log_prob"].sum().backward()
    layer = policy.model.backbone.action_out_proj
    assert layer.weight.shape[0] == 6  # of which the first 3 are executed
    assert bool((layer.weight.grad.abs().sum(1) > 0).all())
    # They have no noise: a chain from the same start whose executed dims are the same has the same other dims.
    again = policy.model.evaluate_tokens(td[schema.OBSERVATION], td[schema.ACTION], None, {schema.CHAIN: chain})[0]
    other = chain.clone()
    other[:, 1:, :, 3:] = 5.0
    other[:, 1:, 2:] = 5.0
    changed = policy.model.evaluate_tokens(td[schema.OBSERVATION], td[schema.ACTION], None, {schema.CHAIN: other})[0]
    torch.testing.assert_close(changed, again)


def test_pi0_with_checkpointing_has_the_same_gradient(pi0: Pi0VLA) -> None:
    gradients = []
    _, td = acted(pi0)
    for checkpointing in (False, True):
        model = seeded(Pi0VLA, architecture=PI0, gradient_checkpointing=checkpointing, **STREAMS, **PROPRIO)
        VLAPolicy(model).evaluate_actions(td)["log_prob"].sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 50
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def test_a_copy_of_a_checkpointed_model_has_layers_of_its_own() -> None:
    """Else a frozen reference, or the policy that acts beside the learner, would follow the learner."""
    model = seeded(VisionLanguageVLA, architecture=PALIGEMMA, gradient_checkpointing=True, **STREAMS, **PROPRIO)
    seen, actions = observations(), torch.zeros(3, 2, 3)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    before = model.evaluate_actions(seen, actions)[0].detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert not torch.allclose(model.evaluate_actions(seen, actions)[0], before)
    for twin in twins:
        torch.testing.assert_close(twin.evaluate_actions(seen, actions)[0].detach(), before)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"chunk_length": 9}, "chunk_length 9 is more than this π0 has: 4"),
        ({"proprio_dim": 9}, "proprio_dim 9 is more than this π0 has: 5"),
        ({"flow_noise": 0.0}, "flow_noise 0.0 must be above 0"),
        ({"architecture": PALIGEMMA}, "architecture: the model has type 'paligemma'; it must be 'pi0'"),
        ({"tokenizer": None}, "tokenizer: missing; name the folder of a tokenizer, or 'bytes'"),
    ],
)
def test_pi0_refuses_what_does_not_fit(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        Pi0VLA(**({"architecture": PI0, **STREAMS, **PROPRIO} | changed))


def test_td3_bc_and_cql_reject_pi0(pi0: Pi0VLA) -> None:
    seen, low = observations(3), -np.ones((2, 3), np.float32)
    images = {name: spaces.Box(0, 255, (3, 20, 20), np.uint8) for name in ("head_rgb", "wrist_rgb")}
    others = {"state": spaces.Box(-9, 9, (5,), np.float32), "instruction": spaces.Box(0, 255, (40,), np.uint8)}
    config = DatasetPolicyConfig(hidden_dim=8, encoder_dim=8)
    actor = vla_policy(copy.deepcopy(pi0), spaces.Dict({**images, **others}), spaces.Box(low, -low), config)
    state = actor.encode(seen)
    with pytest.raises(InputError, match="has no mean action"):
        actor.mean(state)
    with pytest.raises(InputError, match="no log-prob of an action alone"):
        actor.sample(state, 2)


def test_pi0_does_not_score_an_action_without_its_chain(pi0: Pi0VLA) -> None:
    _, td = acted(pi0)
    with pytest.raises(InputError, match="no log-prob of an action alone"):
        pi0.evaluate_actions(td[schema.OBSERVATION], td[schema.ACTION])
    with pytest.raises(InputError, match="no `sample` is stored"):
        VLAPolicy(pi0).evaluate_actions(td.exclude(schema.SAMPLE))


# ----------------------------------------------------------------------------------------------- vision-language models


def test_cameras_and_words_are_embedded_as_transformers_does(vlm: VisionLanguageVLA) -> None:
    trunk, seen = vlm.backbone, observations()
    prefix = trunk.embed(seen, seen["instruction"])
    ids, _ = trunk.tokenize(seen["instruction"], 3, torch.device("cpu"))
    ids = torch.cat([torch.full((3, 8), PALIGEMMA["image_token_id"]), ids], 1)  # two cameras of 2 × 2 cells
    with torch.no_grad():
        expected = trunk.model.model(
            input_ids=ids,
            pixel_values=trunk.preprocess(seen).flatten(0, 1),
            attention_mask=prefix.mask.long(),
            token_type_ids=torch.zeros_like(ids),
        ).last_hidden_state
        found = trunk(prefix)
    torch.testing.assert_close(found[prefix.mask], expected[prefix.mask], rtol=0, atol=1e-5)


def test_the_gaussian_is_a_density_in_the_environments_units() -> None:
    statistics = {"action": {"mean": [0.5, 0.0, -1.0], "std": [2.0, 1.0, 0.5]}}
    model = seeded(VisionLanguageVLA, architecture=PALIGEMMA, statistics=statistics, **STREAMS, **PROPRIO)
    seen, actions = observations(), torch.randn(3, 2, 3)
    mean, log_std = model.gaussian(seen)
    expected = Normal(mean, log_std.exp())
    log_prob, entropy = model.evaluate_actions(seen, actions)
    torch.testing.assert_close(log_prob, expected.log_prob(actions).sum((1, 2)))
    torch.testing.assert_close(entropy, expected.entropy().sum((1, 2)))


def test_layers_that_are_called_as_modules_are_gathered_one_at_a_time(vlm: VisionLanguageVLA, pi0: Pi0VLA) -> None:
    names = sorted(type(layer).__name__ for layer in vlm.gathered_layers())
    assert names == ["GemmaDecoderLayer", "GemmaDecoderLayer", "SiglipEncoderLayer"]
    language = set(pi0.backbone.model.vlm.language_model.modules())
    assert len(pi0.gathered_layers()) == 3  # two of the action expert, one of the vision tower
    assert not language & set(pi0.gathered_layers())


def test_lora_trains_little_and_starts_without_effect(vlm: VisionLanguageVLA) -> None:
    adapted = seeded(
        VisionLanguageVLA, architecture=PALIGEMMA, lora={"r": 2}, gradient_checkpointing=True, **STREAMS, **PROPRIO
    )
    seen, actions = observations(), torch.randn(3, 2, 3)
    log_prob, _ = adapted.evaluate_actions(seen, actions)
    own = {name.replace(".base_layer", ""): value for name, value in adapted.state_dict().items()}
    plain = seeded(VisionLanguageVLA, architecture=PALIGEMMA, **STREAMS, **PROPRIO)
    plain.load_state_dict({name: own[name] for name in plain.state_dict()})
    torch.testing.assert_close(log_prob, plain.evaluate_actions(seen, actions)[0])
    trained = [name for name, value in adapted.backbone.named_parameters() if value.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    log_prob.sum().backward()
    moved = [p for name, p in adapted.backbone.named_parameters() if "lora_B" in name and p.grad is not None]
    assert moved
    with pytest.raises(InputError, match="lora_dropout must be 0"):
        VisionLanguageVLA(architecture=PALIGEMMA, lora={"lora_dropout": 0.1}, **STREAMS, **PROPRIO)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bfloat16_is_kept_inside_and_float32_outside() -> None:
    model = seeded(VisionLanguageVLA, architecture=PALIGEMMA, dtype="bfloat16", lora={"r": 2}, **STREAMS, **PROPRIO)
    policy, td = acted(model)
    assert model.backbone.model.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {td[name].dtype for name in (schema.ACTION, schema.LOG_PROB, schema.VALUE)} == {torch.float32}
    # The same batch: the same rounding.
    torch.testing.assert_close(policy.evaluate_actions(td)["log_prob"], td[schema.LOG_PROB], rtol=0, atol=1e-3)
    with pytest.raises(InputError, match="dtype 'float16' is none of float32, bfloat16"):
        VisionLanguageVLA(architecture=PALIGEMMA, dtype="float16", **STREAMS, **PROPRIO)


# -------------------------------------------------------------------------------------------------------- token actions


def test_bins_are_those_of_openvla() -> None:
    tokens = ActionTokens(600)
    values = np.random.default_rng(0).uniform(-1, 1, 500).astype(np.float32)
    values[:2] = -1.0, 1.0
    edges = np.linspace(-1, 1, 256)
    ids = 600 - np.digitize(values, edges)  # as OpenVLA writes them
    offsets = tokens.encode(torch.from_numpy(values))
    assert (offsets.numpy() + tokens.first == ids).mean() > 0.995  # float32 edges: a value at one may fall beside it
    assert (int(offsets[0]) + tokens.first, int(offsets[1]) + tokens.first) == (599, 344)
    centers = (edges[:-1] + edges[1:]) / 2
    expected = centers[np.clip(600 - (offsets.numpy() + tokens.first) - 1, 0, 254)]
    np.testing.assert_allclose(tokens.decode(offsets).numpy(), expected, atol=1e-6)
    assert float((tokens.decode(offsets) - torch.from_numpy(values)).abs().max()) < 1 / 255 + 1e-6


def test_log_probs_of_tokens_are_the_models_own(openvla: TokenVLA) -> None:
    """Teacher-forced through transformers' forward, over the whole vocabulary cut to the action tokens."""
    _, td = acted(openvla)
    seen, drawn = td[schema.OBSERVATION], td[schema.SAMPLE][schema.TOKENS]
    trunk = openvla.backbone
    ids, is_word = trunk.tokenize(seen["instruction"], 3, torch.device("cpu"))
    for row in range(3):
        words = ids[row, is_word[row]]
        images = torch.full((8,), PALIGEMMA["image_token_id"])
        written = drawn[row] + openvla.tokens.first
        sequence = torch.cat([images, words, written]).unsqueeze(0)
        types = torch.cat([torch.zeros(8 + len(words)), torch.ones(len(written))]).long().unsqueeze(0)
        with torch.no_grad():
            logits = trunk.model(
                input_ids=sequence,
                pixel_values=trunk.preprocess(seen[row : row + 1]).flatten(0, 1),
                token_type_ids=types,
                attention_mask=torch.ones_like(sequence),
            ).logits[0, -len(written) - 1 : -1, -BINS:]
        expected = logits.log_softmax(-1).gather(-1, drawn[row].unsqueeze(-1)).sum()
        torch.testing.assert_close(td[schema.LOG_PROB][row], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_other_vision_language_models_write_and_are_scored_alike(name: str) -> None:
    """Token after token with a cache, and all of them in one pass: the same log-probs, so that nothing sees ahead."""
    model = seeded(TokenVLA, architecture=OTHERS[name], **STREAMS)
    for parameter in model.backbone.model.parameters():
        if not bool(parameter.any()):  # Gemma 3 is blind at first: its projection of pictures starts at 0
            torch.nn.init.normal_(parameter, std=0.1)
    policy, td = acted(model)
    torch.testing.assert_close(policy.evaluate_actions(td)["log_prob"], td[schema.LOG_PROB], rtol=0, atol=1e-4)
    other = td.clone()
    other[schema.OBSERVATION, "head_rgb"] = 255 - td[schema.OBSERVATION, "head_rgb"]
    assert bool((policy.evaluate_actions(other)["log_prob"] != td[schema.LOG_PROB]).all())


def test_both_tokens_of_the_highest_bin_are_scored_apart(openvla: TokenVLA) -> None:
    """Offsets 0 and 1 act alike, so the action alone does not say which was drawn."""
    policy, td = acted(openvla)
    log_probs = []
    for offset in (0, 1):
        one = td.clone()
        one[schema.SAMPLE][schema.TOKENS][:] = offset
        one[schema.ACTION] = openvla._actions(one[schema.SAMPLE][schema.TOKENS], None)
        log_probs.append(policy.evaluate_actions(one)["log_prob"])
    assert bool((log_probs[0] != log_probs[1]).all())


def test_statistics_lead_to_the_environments_units() -> None:
    statistics = {"bridge": {"action": {"q01": [0, -2, 0], "q99": [1, 2, 1], "mask": [True, True, False]}}}
    model = seeded(TokenVLA, architecture=PALIGEMMA, statistics=statistics, **(STREAMS | {"chunk_length": 1}))
    highest, lowest = (model._actions(torch.full((1, 3), offset), None)[0] for offset in (0, 255))
    # ½ (a + 1) (q99 − q01) + q01 with a = ±254/255; the third dim stays as it is
    torch.testing.assert_close(highest, torch.tensor([0.998, 1.992, 0.996]), rtol=0, atol=1e-3)
    torch.testing.assert_close(lowest, torch.tensor([0.002, -1.992, -0.996]), rtol=0, atol=1e-3)


# ---------------------------------------------------------------------------------------------------------------- parts


def test_pictures_are_resized_whole_padded_and_scaled() -> None:
    white = torch.full((1, 10, 20, 3), 255, dtype=torch.uint8)  # channels last
    found = ImagePreprocessor(["a"], 28)(TensorDict({"a": white}, [1]))
    assert found.shape == (1, 1, 3, 28, 28)
    assert bool((found[..., :14, :] == 1.0).all())  # 28 × 14, then black below
    assert bool((found[..., 14:, :] == -1.0).all())
    same = torch.randint(0, 256, (1, 3, 28, 28), dtype=torch.uint8)
    torch.testing.assert_close(ImagePreprocessor(["a"], 28)(TensorDict({"a": same}, [1]))[0, 0], same[0] / 127.5 - 1)
    with pytest.raises(InputError, match="observation 'a' is float32"):
        ImagePreprocessor(["a"], 28)(TensorDict({"a": same.float()}, [1]))


def test_the_folder_says_how_pictures_are_scaled(tmp_path: Path) -> None:
    said = {"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0], "resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    white = TensorDict({"a": torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)}, [1])
    assert bool((ImagePreprocessor(["a"], 4, str(tmp_path))(white) == 1.0).all())


def test_words_are_bytes_or_a_folders_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenize = InstructionTokenizer(None, "bytes", "{instruction}!", 4, 300)
    ids, mask = tokenize(torch.tensor([[97, 0], [97, 98]], dtype=torch.uint8), 2, torch.device("cpu"))
    assert ids.tolist() == [[98, 34, 0, 0], [98, 99, 34, 0]]
    assert mask.tolist() == [[True, True, False, False], [True, True, True, False]]
    tokenizer = Tokenizer(models.WordLevel({"<bos>": 0, "pick": 1, "red": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", unk_token="?").save_pretrained(tmp_path)
    words = InstructionTokenizer(str(tmp_path), None, "{instruction}\n", 4, 300)
    ids, mask = words(torch.tensor([list(b"pick red")], dtype=torch.uint8), 1, torch.device("cpu"))
    assert (ids.tolist(), mask.tolist()) == ([[0, 1, 2, 0]], [[True, True, True, False]])
    with pytest.raises(InputError, match="an instruction has 5 tokens, and prompt_length is 4"):
        words(torch.tensor([list(b"a b c d")], dtype=torch.uint8), 1, torch.device("cpu"))


def test_statistics_of_several_datasets_are_not_guessed_among() -> None:
    one = {"action": {"mean": [0.0], "std": [1.0]}}
    with pytest.raises(InputError, match=r"statistics of 2 datasets \(bridge, droid\)"):
        read_statistics(None, {"bridge": one, "droid": one})


def test_statistics_of_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"norm_stats": {"x": {"action": {"q01": [0], "q99": [4]}}}}))
    found = read_statistics(str(tmp_path), None)
    statistics = Statistics(1, found["action"], "action")
    assert statistics.normalize(torch.tensor([4.0])).tolist() == [1.0]
    assert statistics.denormalize(torch.tensor([-1.0])).tolist() == [0.0]
    own = {"actions_mean": [1.0], "actions_std": [2.0], "state_mean": [3.0], "state_std": [1.0]}
    (tmp_path / "processor_config.json").write_text(json.dumps(own))  # this file goes first
    assert read_statistics(str(tmp_path), None)["state"] == {"mean": [3.0], "std": [1.0]}
    with pytest.raises(InputError, match=r"statistics.action.q99 has 1 numbers; there are 2 dims"):
        Statistics(2, {"q01": [0, 0], "q99": [4]}, "action")
    with pytest.raises(InputError, match="no statistics of `action`; it has"):
        read_statistics(None, {"states": {}})


# -------------------------------------------------------------------------------------------------------------- folders


def test_a_folder_is_loaded_with_its_weights_and_rejected_without(
    tmp_path: Path, vlm: VisionLanguageVLA, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "paligemma"
    vlm.backbone.model.save_pretrained(folder)
    loaded = load_vla_model(folder, "vlm", {**STREAMS, **PROPRIO})
    for name, value in vlm.backbone.model.state_dict().items():
        assert torch.equal(loaded.backbone.model.state_dict()[name], value)
    assert "has no statistics" in caplog.text
    # Without the weights (a checkpoint follows) the architecture alone is read.
    (folder / "model.safetensors").unlink()
    assert VisionLanguageVLA(folder=str(folder), load_weights=False, **STREAMS, **PROPRIO).backbone.width == 32
    with pytest.raises(InputError, match="the weights cannot be read"):
        load_vla_model(folder, "vlm", {**STREAMS, **PROPRIO})
    with pytest.raises(InputError, match="no pretrained model"):
        load_vla_model(tmp_path, "vlm", {**STREAMS, **PROPRIO})
    with pytest.raises(InputError, match="set either the folder of the model"):
        load_vla_model(None, "vlm", {**STREAMS, **PROPRIO})


def test_weights_that_lack_something_are_rejected(tmp_path: Path, pi0: Pi0VLA) -> None:
    from safetensors.torch import load_file, save_file

    pi0.backbone.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("action_out_proj.bias")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"the weights lack action_out_proj.bias; is it the folder of a PI0"):
        load_vla_model(tmp_path, "pi0", {**STREAMS, **PROPRIO})


@pytest.mark.parametrize("kind", ["AutoConfig", "AutoTokenizer", "attention", "attention of a part"])
def test_a_folder_brings_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """transformers asks on the terminal whether to run it, and takes "y" for an answer."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    mark = tmp_path / "mark"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n")
    config: dict[str, Any] = {**PALIGEMMA, "architectures": ["PaliGemmaForConditionalGeneration"]}
    if kind == "AutoConfig":
        config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
    elif kind == "attention":
        config["attn_implementation"] = "evil/attention"
    elif kind == "attention of a part":
        config["attn_implementation"] = {"text_config": "evil/attention"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names if kind == "AutoTokenizer" else {}))
    load = partial(load_vla_model, tmp_path, "vlm", {**STREAMS, **PROPRIO})
    if kind == "AutoTokenizer":
        load = partial(InstructionTokenizer, str(tmp_path), None, "{instruction}", 8, 600)
    with pytest.raises(InputError, match="--trust-remote-code"):
        load()
    assert not mark.exists()
