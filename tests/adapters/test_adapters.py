"""The sampler in other trainers is called once an update and leaves their weights alone."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from halation import RankSampler
from halation.errors import InputError

PROMPTS = ("one", "two")


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5))
        generator = torch.Generator().manual_seed(0)
        for weight in self.inner.parameters():
            weight.data = torch.randn(weight.shape, generator=generator)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.inner(x) + 0.1 * torch.randn_like(x)).square().mean()}

    def draw(self, prompt: str, generator: torch.Generator) -> Tensor:
        assert not self.inner[1].training
        torch.rand(5)
        return torch.sigmoid(self.inner(torch.randn(1, 12, generator=generator))).reshape(3, 2, 2)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((12,), index / 16)}


def drawn_steps(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "samples").glob("step_*"))


def weights(model: nn.Module) -> list[bytes]:
    return [weight.detach().numpy().tobytes() for weight in model.parameters()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_draws_after_updates_and_not_after_batches_that_only_add_up(tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer, seed_everything

    from halation.adapters.lightning import LightningSamplerCallback

    class Training(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Scale()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(*callbacks: Any, model: LightningModule) -> list[bytes]:
        seed_everything(0, verbose=False)
        trainer = Trainer(
            accelerator="cpu",
            max_steps=4,
            accumulate_grad_batches=2,
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, torch.utils.data.DataLoader(Rows(), batch_size=2, shuffle=True))
        return weights(model)

    plain, sampled = Training(), Training()
    sampler = RankSampler(sampled.model.draw, PROMPTS, tmp_path / "run", every=2)
    before = weights(plain)
    assert before != train(model=plain) == train(LightningSamplerCallback(sampler), model=sampled)
    assert drawn_steps(tmp_path / "run") == ["step_0000000", "step_0000002", "step_0000004"]
    assert sampler.modules == (sampled,)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_transformers_trainer_draws_after_updates(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments, set_seed

    from halation.adapters.transformers import TransformersSamplerCallback

    def train(*callbacks: Any, model: nn.Module) -> list[bytes]:
        settings = TrainingArguments(
            output_dir=str(tmp_path / "trainer"),
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        set_seed(0)
        Trainer(model=model, args=settings, train_dataset=Rows(), callbacks=list(callbacks)).train()
        return weights(model)

    plain, sampled = Scale(), Scale()
    sampler = RankSampler(sampled.draw, PROMPTS, tmp_path / "run", every=2)
    before = weights(plain)
    assert before != train(model=plain) == train(TransformersSamplerCallback(sampler), model=sampled)
    assert drawn_steps(tmp_path / "run") == ["step_0000000", "step_0000002", "step_0000004"]


def test_the_transformers_callback_names_the_model_and_draws_at_the_trainers_steps(tmp_path: Path) -> None:
    from transformers import TrainerControl, TrainerState

    from halation.adapters.transformers import TransformersSamplerCallback

    model = Scale().train()
    sampler = RankSampler(model.draw, PROMPTS, tmp_path / "run", every=2)
    callback = TransformersSamplerCallback(sampler)
    arguments: Any = None
    callback.on_train_begin(arguments, TrainerState(global_step=0), TrainerControl(), model=model)
    for step in (1, 2):
        callback.on_step_end(arguments, TrainerState(global_step=step), TrainerControl(), model=model)
    assert sampler.modules == (model,)
    assert drawn_steps(tmp_path / "run") == ["step_0000000", "step_0000002"]
    assert len(list((tmp_path / "run").rglob("sample_*.png"))) == 4


def test_accelerate_names_the_model_that_it_prepared(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from halation.adapters.accelerate import rank_sampler

    model = Scale()
    accelerator = Accelerator(cpu=True)
    sampler = rank_sampler(accelerator, accelerator.prepare(model), model.draw, PROMPTS, tmp_path / "run", 3, every=5)
    assert sampler.modules == (model,)
    assert [sample.seed for sample in sampler(10)] == [3, 4]
    assert sampler(11) == ()


def test_accelerate_names_the_wrapper_too_so_that_a_draw_which_calls_it_is_refused(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from halation.adapters.accelerate import rank_sampler

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(Scale())
        sampler = rank_sampler(Accelerator(cpu=True), wrapped, wrapped.module.draw, PROMPTS, tmp_path / "run")
        assert sampler.modules == (wrapped,)
        assert [sample.state for sample in sampler(1)] == ["done", "done"]
    finally:
        dist.destroy_process_group()


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "halation.adapters.lightning", raising=False)
    with pytest.raises(InputError, match=r"lightning is not installed(.|\n)*pip install lightning"):
        importlib.import_module("halation.adapters.lightning")
