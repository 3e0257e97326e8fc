"""A small GPT-2 on the source of Python's standard library, with Transformers' Trainer. Kill it and start it again.

    python examples/transformers_trainer.py --out runs/gpt2 --steps 60 --every 10                        # alone
    torchrun --nproc-per-node 4 examples/transformers_trainer.py --out runs/gpt2 --steps 60 --every 10   # four ranks
    unbroken prove --nproc 4 --trials 5 -- examples/transformers_trainer.py --out {out} --steps 60       # what changes?

It prints `restored step K …` when it resumes and `final <sha256>` over all weights at the end: the same digest
whether or not it was ever killed.
"""

import argparse
import hashlib
import os
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import unbroken
from unbroken.integrations.transformers import attach

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs/gpt2", help="run directory; all nodes must share it")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
args = parser.parse_args()

block, text_bytes = 64, 1 << 15  # little text, so that a short run crosses the edge of an epoch too


class Text(Dataset):
    """The standard library, byte by byte, in blocks."""

    def __init__(self):
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files[:8])[:text_bytes]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self):
        return len(self.text) // block

    def __getitem__(self, index):
        tokens = self.text[index * block : (index + 1) * block]
        return {"input_ids": tokens, "labels": tokens}


set_seed(1337)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=block, n_embd=64, n_layer=2, n_head=4))
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=f"{args.out}/trainer",
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=15,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_timeout=30,  # when a node is lost, the others must find out
        seed=1337,
    ),
    train_dataset=Text(),
    eval_dataset=torch.utils.data.Subset(Text(), range(16)),
)
attach(trainer, args.out, every=unbroken.Every(steps=args.every))
trainer.train()

if trainer.is_world_process_zero():
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
    print(f"final {digest.hexdigest()}", flush=True)
    (Path(args.out) / "final.txt").write_text(f"final {digest.hexdigest()}\n")
if "RANK" in os.environ:
    torch.distributed.destroy_process_group()
