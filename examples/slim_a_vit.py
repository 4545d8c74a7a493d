"""Remove the norms of a third-party Vision Transformer, verify the result.

Run it in onnxruntime.

    pip install -e ".[export]" transformers scikit-learn && python examples/slim_a_vit.py

It takes a quarter of a minute on a CPU. transformers' ViT with LayerNorm learns the 8 x 8 digits of scikit-learn. UN
replaces its norms, fitted to them; 60 more steps with frozen statistics adapt the weights; the norms fold away.
"""

import sys
import tempfile

import torch
from sklearn.datasets import load_digits

import normkit as nk

sys.modules.setdefault("torchvision", None)  # not needed, and its build may not fit this PyTorch
from transformers import ViTConfig, ViTForImageClassification  # noqa: E402

torch.manual_seed(0)
torch.set_num_threads(1)  # matrices this small do not profit from more threads
digits = load_digits()
images, labels = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32), torch.tensor(digits.target)
order = torch.randperm(len(images))
seen, test = order[:1300], order[1300:]


def train(model, steps, lr):
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for _ in range(steps):
        batch = seen[torch.randint(len(seen), (64,))]
        loss = model(images[batch], labels=labels[batch]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model):
    return f"{100 * (model(images[test]).logits.argmax(1) == labels[test]).float().mean():.1f} %"


config = ViTConfig(image_size=8, patch_size=2, num_channels=1, hidden_size=48, num_hidden_layers=2,
                   num_attention_heads=4, intermediate_size=96, num_labels=10)  # fmt: skip
vit = train(ViTForImageClassification(config), 200, 3e-3)
print("LayerNorm:", accuracy(vit))

batches = [{"pixel_values": images[part]} for part in seen.split(100)]
swapped = nk.convert(vit, "un")
print("UN, calibrated without training:", accuracy(nk.calibrate(swapped, batches)))
slim = nk.calibrate(swapped, batches, like=vit)
print("UN, fitted without training:", accuracy(slim))
slim = train(slim, 60, 1e-3)  # in evaluation mode, so that statistics are frozen
print("UN, after 60 steps:", accuracy(slim))

folded, report = nk.fold(slim, outputs=lambda out: out.logits, pixel_values=images[test][:2])
print(f"{report}\nfolded: {accuracy(folded)}")
with tempfile.TemporaryDirectory() as folder:
    print(nk.export(folded, f"{folder}/vit.onnx", outputs=lambda out: out.logits, pixel_values=images[test][:2]))
