"""The data side of a world model on Atari frames: burn-in, resets within windows, masks.

expstore ingest gym:ALE/Pong-v5 pong.exp --steps 20000
python world_model.py pong.exp

A recurrent model reads windows of `burn_in + length` frames. The burn-in brings its state up to
date without gradients; `is_first` empties the state where an episode begins inside a window.
"""

import sys

import torch
from torch import nn
from torch.nn import functional

import expstore

LENGTH, BURN_IN, BATCH = 16, 4, 8


class Model(nn.Module):
    def __init__(self, channels: int, actions: int, width: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, width),
        )  # fmt: skip
        self.actions, self.width = actions, width
        self.cell = nn.GRUCell(width + actions, width)
        self.next_code, self.reward = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, codes, actions, is_first, state):
        """(B, W, ...) codes and actions to the states (B, W, width) after each step."""
        states = []
        for t in range(codes.shape[1]):
            state = state * ~is_first[:, t, None]
            state = self.cell(torch.cat([codes[:, t], actions[:, t]], 1), state)
            states.append(state)
        return torch.stack(states, 1)


def losses(model: Model, batch: expstore.Batch) -> torch.Tensor:
    frames = batch["observation"].float() / 255
    size, window = frames.shape[:2]
    flat = frames.flatten(0, 1)
    flat = flat[:, None] if flat.ndim == 3 else flat.permute(0, 3, 1, 2)
    codes = model.encoder(flat).unflatten(0, (size, window))
    actions = functional.one_hot(batch["action"].long(), model.actions).float()
    valid, learning = batch.info.validity_mask, batch.info.learning_mask & batch.info.validity_mask
    # A window begins with an empty state, and so does each episode in it.
    is_first = torch.zeros_like(valid)
    is_first[:, 0] = True
    is_first[:, 1:] = batch["done"][:, :-1] | (valid[:, 1:] & ~valid[:, :-1])
    state = torch.zeros(size, model.width)
    with torch.no_grad():
        before = model(codes[:, :BURN_IN], actions[:, :BURN_IN], is_first[:, :BURN_IN], state)
    after = slice(BURN_IN, None)
    states = model(codes[:, after], actions[:, after], is_first[:, after], before[:, -1])
    learn = learning[:, after]
    reward = model.reward(states).squeeze(-1) - batch["reward"][:, after].float()
    # What a state says of the next frame counts where that is the next of the same episode.
    pairs = learn[:, :-1] & learn[:, 1:] & ~batch["done"][:, after][:, :-1]
    code = model.next_code(states[:, :-1]) - codes[:, after][:, 1:].detach()
    return reward[learn].square().mean() + code[pairs].square().mean()


def train(path: str, steps: int = 300, every: int = 50, seed: int = 0) -> list[tuple[int, float]]:
    torch.manual_seed(seed)
    store = expstore.open(path)
    # Windows run on across the ends of episodes.
    unit = expstore.Sequence(length=LENGTH, burn_in=BURN_IN, episode_boundary="include_reset")
    fields = ("observation", "action", "reward", "done")
    shape = store.fields["observation"].shape
    actions = int(expstore.OfflineDataset(store).statistics("action").max) + 1
    model = Model(shape[2] if len(shape) == 3 else 1, actions)
    step_of = torch.optim.Adam(model.parameters(), 3e-4)
    curve = []
    with expstore.Replay(store, BATCH, unit=unit, fields=fields, prefetch=2, seed=seed) as replay:
        for step in range(1, steps + 1):
            loss = losses(model, replay.sample())
            step_of.zero_grad()
            loss.backward()
            step_of.step()
            if step % every == 0:
                curve.append((step, float(loss.detach())))
    return curve


if __name__ == "__main__":
    for step, loss in train(sys.argv[1]):
        print(f"{step:6d} {loss:10.5f}")
