"""Laws of training diffusers families: their own loss and samples, on tiny real models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid
from diffusers.training_utils import compute_loss_weighting_for_sd3
from torch import Tensor

from halation.models.denoiser import Condition, SolverSettings
from halation.models.pipelines.training.denoiser import PipelineDenoiser
from halation.sample_specs import SampleBatch, SampleSpec
from halation.training.loop import denoising_objective
from support import tiny_models
from support.tiny_models import plain_pipe

FAMILIES = ["hunyuan", "pixart", "pixart_sigma", "sd3", "flux", "wan_one"]
HEIGHT, WIDTH = 32, 48
CAPTIONS = ["a red car", "two dogs on a street at night"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # diffusers' DPM-Solver
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),  # RMSNorm under autocast
]


def opened(family: str | Path, **changes: Any) -> PipelineDenoiser:
    folder = family if isinstance(family, Path) else tiny_models.built(family)
    usual = {"dtype": "fp32", "weights_dtype": "fp32", "lora": None, "height": HEIGHT, "width": WIDTH}
    return PipelineDenoiser.open(folder, **{**usual, **changes})


def batch(*prompts: str, **changes: Any) -> SampleBatch:
    usual: dict[str, Any] = {"height": HEIGHT, "width": WIDTH, "steps": 3, "guidance_scale": 4.0}
    specs = tuple(
        SampleSpec(index=index, id=str(index), prompt=prompt, **{**usual, "seed": 7 + index, **changes})
        for index, prompt in enumerate(prompts)
    )
    return SampleBatch(specs=specs, num_real=len(specs))


def sampled(denoiser: PipelineDenoiser, wanted: SampleBatch, dtype: torch.dtype = torch.float32) -> Tensor:
    return denoiser.sample(denoiser.prepare(wanted, "cpu"), SolverSettings(dtype=dtype), lambda: None)


class Texts:
    """Embeddings made beforehand, all in one go."""

    def __init__(self, denoiser: PipelineDenoiser, texts: list[str]) -> None:
        with denoiser.load_text_encoders("cpu") as encode:
            self.rows = encode(texts)
        self.places = {text: place for place, text in enumerate(texts)}

    def __contains__(self, text: str) -> bool:
        return text in self.places

    def read(self, texts: Sequence[str]) -> Condition:
        return {name: rows[[self.places[text] for text in texts]] for name, rows in self.rows.items()}


class Rows:
    """What a training step sees."""

    def __init__(self, denoiser: PipelineDenoiser, t: Tensor) -> None:
        generator = torch.Generator().manual_seed(3)
        shape = (len(t), *denoiser.sample_shape(HEIGHT, WIDTH))
        self.x0 = torch.randn(shape, generator=generator)
        self.noise = torch.randn(shape, generator=generator)
        self.t = t
        condition = denoiser.encode_captions(CAPTIONS, [0, 0])
        self.condition = denoiser.add_size_condition(condition, torch.tensor([[64, 48], [300, 640]]), HEIGHT, WIDTH)


def loss(denoiser: PipelineDenoiser, rows: Rows) -> Tensor:
    return denoising_objective(denoiser)(denoiser.module, rows)  # type: ignore[arg-type]


# What diffusers' own code computes for the same noise and timesteps


def hunyuan_loss(pipe: Any, rows: Rows, timesteps: Tensor) -> Tensor:
    texts: list[Tensor] = []
    for index, length in enumerate((77, 256)):
        embeds, _, mask, _ = pipe.encode_prompt(CAPTIONS, max_sequence_length=length, text_encoder_index=index)
        texts += [embeds, mask]
    rotary = get_2d_rotary_pos_embed(
        pipe.transformer.inner_dim // pipe.transformer.num_heads,
        get_resize_crop_region_for_grid((2, 3), 512 // 8 // 2),
        (2, 3),
        output_type="pt",
    )
    # Of 64 x 48 the middle of the height is cut away at scale 1; of 300 x 640 some of the width at scale 32 / 300.
    sizes = torch.tensor([[64, 48, 32, 48, 16, 0], [300, 640, 32, 48, 0, 10]], dtype=torch.float32)
    noisy = pipe.scheduler.add_noise(rows.x0, rows.noise, timesteps)
    answer = pipe.transformer(
        noisy,
        timesteps.float(),
        *texts,
        image_meta_size=sizes,
        style=torch.zeros(2, dtype=torch.int64),
        image_rotary_emb=rotary,
        return_dict=False,
    )[0].chunk(2, dim=1)[0]
    target = pipe.scheduler.get_velocity(rows.x0, rows.noise, timesteps)
    return (answer - target).square().mean((1, 2, 3))


def pixart_loss(pipe: Any, rows: Rows, timesteps: Tensor) -> Tensor:
    length = 120 if "Alpha" in type(pipe).__name__ else 300
    embeds, mask, _, _ = pipe.encode_prompt(CAPTIONS, max_sequence_length=length)
    training = diffusers.DDPMScheduler.from_config(pipe.scheduler.config)
    noisy = training.add_noise(rows.x0, rows.noise, timesteps)
    answer = pipe.transformer(
        noisy,
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask,
        timestep=timesteps,
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    ).sample.chunk(2, 1)[0]
    return (answer.float() - rows.noise).square().mean((1, 2, 3))


def _flow(pipe: Any, rows: Rows, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    timesteps, sigmas = pipe.scheduler.timesteps[places], pipe.scheduler.sigmas[places].reshape(-1, 1, 1, 1)
    return (1.0 - sigmas) * rows.x0 + sigmas * rows.noise, timesteps, sigmas


def _weighted(answer: Tensor, rows: Rows, sigmas: Tensor) -> Tensor:
    weighting = compute_loss_weighting_for_sd3(weighting_scheme="logit_normal", sigmas=sigmas)
    return (weighting.float() * (answer.float() - (rows.noise - rows.x0).float()) ** 2).mean((1, 2, 3))


def sd3_loss(pipe: Any, rows: Rows, places: Tensor) -> Tensor:
    embeds, _, pooled, _ = pipe.encode_prompt(CAPTIONS, None, None)
    noisy, timesteps, sigmas = _flow(pipe, rows, places)
    answer = pipe.transformer(
        hidden_states=noisy,
        timestep=timesteps,
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
        return_dict=False,
    )[0]
    return _weighted(answer, rows, sigmas)


def flux_loss(pipe: Any, rows: Rows, places: Tensor) -> Tensor:
    embeds, pooled, text_ids = pipe.encode_prompt(CAPTIONS)
    noisy, timesteps, sigmas = _flow(pipe, rows, places)
    num, channels, height, width = noisy.shape
    answer = pipe.transformer(
        hidden_states=pipe._pack_latents(noisy, num, channels, height, width),
        timestep=timesteps / 1000,
        guidance=torch.tensor([3.5]).expand(num) if pipe.transformer.config.guidance_embeds else None,
        pooled_projections=pooled,
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=pipe._prepare_latent_image_ids(num, height // 2, width // 2, "cpu", torch.float32),
        return_dict=False,
    )[0]
    return _weighted(pipe._unpack_latents(answer, HEIGHT, WIDTH, pipe.vae_scale_factor), rows, sigmas)


def wan_loss(pipe: Any, rows: Rows, places: Tensor) -> Tensor:
    embeds, _ = pipe.encode_prompt(CAPTIONS, max_sequence_length=512)
    noisy, timesteps, sigmas = _flow(pipe, rows, places)
    if pipe.config.expand_timesteps:
        timesteps = torch.ones(len(noisy), noisy[0, 0, ::2, ::2].numel()) * timesteps.reshape(-1, 1)
    answer = pipe.transformer(
        hidden_states=noisy[:, :, None], timestep=timesteps, encoder_hidden_states=embeds, return_dict=False
    )[0]
    return _weighted(answer[:, :, 0], rows, sigmas)


LOSSES: dict[str, Callable[[Any, Rows, Tensor], Tensor]] = {
    "hunyuan": hunyuan_loss,
    "pixart": pixart_loss,
    "pixart_sigma": pixart_loss,
    "sd3": sd3_loss,
    "flux": flux_loss,
    "wan_one": wan_loss,
}


def training_scheduler(scheduler: Any) -> Any:
    """A fresh training scheduler: one that sampled has few steps, and some solvers only sample."""
    if scheduler.config.get("use_flow_sigmas"):
        return diffusers.FlowMatchEulerDiscreteScheduler(shift=scheduler.config.flow_shift)
    return type(scheduler).from_config(scheduler.config)


@torch.no_grad()
def agrees(family: str, pipe: Any, denoiser: PipelineDenoiser) -> None:
    places = torch.tensor([41, 870])
    pipe = copy.copy(pipe)
    pipe.scheduler = training_scheduler(pipe.scheduler)
    flow = family in ("sd3", "flux", "wan_one")
    t = pipe.scheduler.sigmas[places] if flow else (places + 0.5) / 1000
    rows = Rows(denoiser, t)
    ours, theirs = loss(denoiser, rows), LOSSES[family](pipe, rows, places)
    assert ours.shape == (2,)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
    other = replace_times(rows, t.flip(0))
    assert not torch.allclose(loss(denoiser, other), ours, rtol=1e-3)


def replace_times(rows: Rows, t: Tensor) -> Rows:
    other = Rows.__new__(Rows)
    other.__dict__ = {**rows.__dict__, "t": t}
    return other


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_what_the_familys_own_training_code_computes(family: str) -> None:
    agrees(family, plain_pipe(family), opened(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_is_what_the_pipeline_draws_from_the_same_prompt_and_seed(family: str) -> None:
    denoiser, pipe = opened(family), copy.copy(plain_pipe(family))
    # As in training, the weights lie in memory of their own: where they begin decides how a single row is rounded.
    pipe.transformer = copy.deepcopy(pipe.transformer)
    steps: list[int] = []
    ours = denoiser.sample(denoiser.prepare(batch(CAPTIONS[1]), "cpu"), SolverSettings(), lambda: steps.append(1))
    binning = {"use_resolution_binning": False}
    optional: dict[str, Any] = binning if family in ("hunyuan", "pixart", "pixart_sigma") else {}
    if family == "wan_one":
        optional = {"num_frames": 1}
    reference = pipe(
        prompt=[CAPTIONS[1]],
        generator=[torch.Generator().manual_seed(7)],
        num_inference_steps=3,
        guidance_scale=4.0,
        height=HEIGHT,
        width=WIDTH,
        output_type="latent",
        **optional,
    )[0]
    if family == "flux":
        reference = pipe._unpack_latents(reference, HEIGHT, WIDTH, pipe.vae_scale_factor)
    assert torch.equal(ours, reference.squeeze(2) if family == "wan_one" else reference)
    assert len(steps) == 3
    assert denoiser.space.decode(ours).shape == (1, HEIGHT, WIDTH, 3)


@pytest.mark.parametrize(
    "family",
    [
        "hunyuan",
        "pixart",
        "flux",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("pixart_sigma", "sd3", "wan_one")),
    ],
)
def test_prompt_seed_steps_and_guidance_each_change_a_sample_and_neighbours_do_not(family: str) -> None:
    denoiser = opened(family)
    long = "three cats in a very long painting of a street " * 4
    denoiser.set_text_store(Texts(denoiser, ["", "a red car", "a dog", "a blue house", long]))
    first = sampled(denoiser, batch("a red car", "a dog"))
    for changed in (
        batch("a blue house", "a dog"),
        batch("a red car", "a dog", seed=99),
        batch("a red car", "a dog", steps=4),
        batch("a red car", "a dog", guidance_scale=1.5),
    ):
        assert (sampled(denoiser, changed)[0] - first[0]).abs().max() > 1e-4
    beside = sampled(denoiser, batch("a red car", long))
    assert torch.equal(beside[0], first[0])
    filler = denoiser.dummy_inputs(batch("a red car", "a dog"), "cpu")
    assert denoiser.sample(filler, SolverSettings(dtype=torch.bfloat16), lambda: None).isfinite().all()
    one, other = denoiser.prepare(batch("a dog", "a red car", "a dog"), "cpu").halves()
    assert (one.num_rows, other.num_rows, other.seeds) == (2, 1, (9,))


@pytest.mark.parametrize("family", ["hunyuan", "flux", pytest.param("wan_one", marks=pytest.mark.slow)])
def test_recomputed_activations_and_half_precision_train_everything(family: str) -> None:
    """Recomputed activations give the same gradients, and half precision trains every weight."""
    denoiser = opened(family)
    rows = Rows(denoiser, torch.tensor([0.2, 0.7]))

    def gradients() -> list[Tensor]:
        denoiser.module.zero_grad()
        loss(denoiser, rows).mean().backward()
        return [parameter.grad.clone() for parameter in denoiser.module.parameters() if parameter.grad is not None]

    kept = gradients()
    denoiser.enable_gradient_checkpointing()
    denoiser.enable_gradient_checkpointing()
    again = gradients()
    assert len(kept) == len(list(denoiser.module.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = gradients()
    assert all(grad.isfinite().all() for grad in narrow)
    assert len(narrow) == len(kept)


@pytest.mark.parametrize(
    ("family", "text"), [("hunyuan", "t5"), pytest.param("wan_one", "umt5", marks=pytest.mark.slow)]
)
def test_weights_in_bfloat16_train_and_draw(family: str, text: str) -> None:
    denoiser = opened(family, dtype="bf16", weights_dtype="bf16")
    rows = Rows(denoiser, torch.tensor([0.2, 0.7]))
    assert rows.condition[text].dtype == torch.bfloat16
    assert {parameter.dtype for parameter in denoiser.module.parameters()} == {torch.bfloat16}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss(denoiser, rows).mean().backward()
    loss(denoiser, rows).mean().backward()
    assert sampled(denoiser, batch("a red car"), torch.bfloat16).dtype == torch.float32
    assert sampled(denoiser, batch("a red car")).isfinite().all()


def test_flux_without_distilled_guidance_trains_and_draws(tmp_path: Path) -> None:
    folder = tiny_models.flux(tmp_path / "schnell", guidance_embeds=False)
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(folder))
    denoiser = opened(folder)
    agrees("flux", pipe, denoiser)
    assert sampled(denoiser, batch("a red car")).isfinite().all()


def test_wan_with_a_time_for_each_token_trains_and_draws(tmp_path: Path) -> None:
    pipe = copy.copy(plain_pipe("wan_one"))
    pipe.register_to_config(expand_timesteps=True)
    pipe.save_pretrained(tmp_path / "wan")
    denoiser = opened(tmp_path / "wan")
    agrees("wan_one", pipe, denoiser)
    pipe.transformer = copy.deepcopy(pipe.transformer)
    reference = pipe(
        prompt=["a dog"],
        generator=[torch.Generator().manual_seed(7)],
        num_inference_steps=2,
        height=HEIGHT,
        width=WIDTH,
        num_frames=1,
        output_type="latent",
    )[0]
    assert torch.equal(sampled(denoiser, batch("a dog", steps=2, guidance_scale=5.0)), reference[:, :, 0])


def test_sd3_without_its_t5_trains_and_draws(tmp_path: Path) -> None:
    plain = diffusers.DiffusionPipeline.from_pretrained(
        str(tiny_models.built("sd3")), text_encoder_3=None, tokenizer_3=None
    )
    plain.save_pretrained(tmp_path / "sd3")
    denoiser = opened(tmp_path / "sd3")
    agrees("sd3", plain, denoiser)
    assert sampled(denoiser, batch("a red car")).isfinite().all()


def test_pixart_is_told_the_size_of_the_image_where_it_asks(tmp_path: Path) -> None:
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tiny_models.built("pixart")))
    sized = {"use_additional_conditions": True, "sample_size": 128, "attention_head_dim": 12, "cross_attention_dim": 48}
    config = {**pipe.transformer.config, **sized}
    with torch.random.fork_rng(devices=[]):
        pipe.register_modules(transformer=diffusers.PixArtTransformer2DModel.from_config(config))
    tiny_models.awaken(pipe.transformer)
    pipe.save_pretrained(tmp_path / "sized")
    denoiser = opened(tmp_path / "sized")
    rows = Rows(denoiser, torch.tensor([0.2005, 0.7005]))
    noisy = denoiser.noise_path.add_noise(rows.x0, rows.noise, rows.t)
    told = {"resolution": torch.tensor([[32.0, 48.0]] * 2), "aspect_ratio": torch.tensor([[32 / 48]] * 2)}
    reference = denoiser.module(
        noisy,
        encoder_hidden_states=rows.condition["t5"],
        encoder_attention_mask=rows.condition["t5_mask"],
        timestep=torch.tensor([200, 700]),
        added_cond_kwargs=told,
        return_dict=False,
    )[0][:, :4]
    assert torch.equal(denoiser.forward(denoiser.module, noisy, rows.t, rows.condition), reference)
    assert sampled(denoiser, batch("a red car")).isfinite().all()
