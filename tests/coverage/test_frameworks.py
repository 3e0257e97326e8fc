"""No false alarm in a plain Transformers or Lightning process: their insides look like much that could be forgotten.

The Checkpointer is given the framework's own model, optimizer and scheduler. What is left is true: the loader that
feeds the training goes on from no saved position.
"""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import unbroken

SAVED = unbroken.Every(steps=3)


def told(caplog):
    """What was named, without names and classes."""
    lines = [record.message for record in caplog.records if "looks like training state" in record.message]
    return [part.split(" `")[0].strip() for line in lines for part in line.split(": ", 1)[1].split(";")[0].split(", ")]


class Text(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        ids = torch.arange(index, index + 8) % 50
        return {"input_ids": ids, "labels": ids}


def test_of_a_transformers_trainer_only_the_loader_is_named(tmp_path, caplog):
    transformers = pytest.importorskip("transformers")

    class Save(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **more):
            registered = {"model": model, "optimizer": optimizer, "scheduler": lr_scheduler}
            self.ckpt = unbroken.Checkpointer(tmp_path / "run", registered, every=SAVED)
            self.ckpt.restore()

        def on_step_end(self, args, state, control, **more):
            self.ckpt.step()

        def on_train_end(self, args, state, control, **more):
            self.ckpt.close()

    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    options = {"max_steps": 6, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True}
    options |= {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2, "disable_tqdm": True}
    args = transformers.TrainingArguments(str(tmp_path / "out"), **options)
    trainer = transformers.Trainer(model, args, train_dataset=Text(), eval_dataset=Text(), callbacks=[Save()])
    with caplog.at_level(logging.INFO, "unbroken"):
        trainer.train()
    assert (tmp_path / "run/step-6/manifest.json").exists()
    assert told(caplog) == ["loader"]


def test_of_a_lightning_trainer_only_the_loader_is_named(tmp_path, caplog):
    lightning = pytest.importorskip("lightning")

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def validation_step(self, batch, index):
            self.log("value", self.net(batch[0]).mean())

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    class Save(lightning.Callback):
        def on_train_start(self, trainer, module):
            scheduler = trainer.lr_scheduler_configs[0].scheduler
            registered = {"model": module, "optimizer": trainer.optimizers[0], "scheduler": scheduler}
            self.ckpt = unbroken.Checkpointer(tmp_path / "run", registered, every=SAVED)
            self.ckpt.restore()

        def on_train_batch_end(self, *more):
            self.ckpt.step()

        def on_train_end(self, *more):
            self.ckpt.close()

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(
        max_steps=6, val_check_interval=2, default_root_dir=tmp_path, callbacks=[Save()], **quiet
    )
    data = TensorDataset(torch.randn(64, 4))
    with caplog.at_level(logging.INFO, "unbroken"):
        trainer.fit(Net(), DataLoader(data, 4, shuffle=True), DataLoader(data, 4))
    assert (tmp_path / "run/step-6/manifest.json").exists()
    assert told(caplog) == ["loader"]
