"""Samples on every rank of a transformers Trainer.

python examples/with_transformers.py
torchrun --standalone --nproc_per_node 2 examples/with_transformers.py
"""

from __future__ import annotations

from pathlib import Path

from tiny_flow import PROMPTS, Scenes, TinyFlow, arguments
from transformers import Trainer, TrainingArguments, set_seed

from halation import RankSampler
from halation.adapters.transformers import TransformersSamplerCallback


def main(out: str, num_steps: int, every: int) -> None:
    settings = TrainingArguments(
        output_dir=str(Path(out) / "trainer"),
        max_steps=num_steps,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    set_seed(0)
    model = TinyFlow()
    sampler = RankSampler(model.draw, PROMPTS, out, seed=42, every=every)
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=Scenes(num_steps * 16),
        callbacks=[TransformersSamplerCallback(sampler)],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"images are in {sampler.run.samples}; to look at them: halation gallery {out}")


if __name__ == "__main__":
    main(**arguments("runs/with_transformers"))
