"""A small world model on Atari frames: burn-in, resets within windows, masks.

expstore ingest gym:ALE/Pong-v5 pong.exp --steps 20000
python world_model.py pong.exp

A recurrent model reads windows of `burn_in + length` frames and foretells the next frame, small
and gray, and the reward. The burn-in brings its state up to date without gradients; `is_first`
empties the state where an episode begins inside a window.
"""

import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import expstore

LENGTH, BURN_IN, BATCH, SMALL = 16, 4, 8, 20


class Model(nn.Module):
    def __init__(self, mean: torch.Tensor, actions: int, width: int = 128) -> None:
        super().__init__()
        self.mean, self.actions, self.width = mean, actions, width
        self.encoder = nn.Sequential(nn.Linear(SMALL * SMALL, width), nn.ReLU())
        self.cell = nn.GRUCell(width + actions, width)
        self.next_frame, self.reward = nn.Linear(width, SMALL * SMALL), nn.Linear(width, 1)

    def forward(self, codes, actions, is_first, state):
        """(B, W, ...) codes and actions to the states (B, W, width) after each step."""
        states = []
        for t in range(codes.shape[1]):
            state = state * ~is_first[:, t, None]
            state = self.cell(torch.cat([codes[:, t], actions[:, t]], 1), state)
            states.append(state)
        return torch.stack(states, 1)


def small(frames: torch.Tensor) -> torch.Tensor:
    """Frames (..., height, width, channels) as vectors (..., 400): small, gray, from 0 to 10."""
    gray = frames.float().mean(-1) if frames.ndim > 3 and frames.shape[-1] == 3 else frames.float()
    pooled = functional.adaptive_avg_pool2d(gray.flatten(0, -3)[:, None], SMALL)
    return pooled.reshape(*gray.shape[:-2], SMALL * SMALL) / 25.5


def losses(model: Model, batch: expstore.Batch) -> torch.Tensor:
    frames = small(batch["observation"]) - model.mean
    size = len(frames)
    codes = model.encoder(frames)
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
    # To foretell the mean frame would leave an error of 1.
    following = frames[:, after][:, 1:]
    error = (model.next_frame(states[:, :-1]) - following)[pairs].square().mean()
    return reward[learn].square().mean() + error / following[pairs].square().mean()


def train(path: str, steps: int = 1000, every: int = 50, seed: int = 0) -> list[tuple[int, float]]:
    torch.manual_seed(seed)
    store = expstore.open(path)
    # Windows run on across the ends of episodes.
    unit = expstore.Sequence(length=LENGTH, burn_in=BURN_IN, episode_boundary="include_reset")
    fields = ("observation", "action", "reward", "done")
    some = store.read(np.arange(0, store.num_steps, max(1, store.num_steps // 200)), fields[:1])
    mean = small(torch.from_numpy(some["observation"])).mean(0)
    actions = int(expstore.OfflineDataset(store).statistics("action").max) + 1
    model = Model(mean, actions)
    step_of = torch.optim.Adam(model.parameters(), 1e-3)
    curve, sum_of_losses = [], 0.0
    with expstore.Replay(store, BATCH, unit=unit, fields=fields, prefetch=2, seed=seed) as replay:
        for step in range(1, steps + 1):
            loss = losses(model, replay.sample())
            step_of.zero_grad()
            loss.backward()
            step_of.step()
            sum_of_losses += float(loss.detach())
            if step % every == 0:
                curve.append((step, sum_of_losses / every))
                sum_of_losses = 0.0
    return curve


if __name__ == "__main__":
    for step, loss in train(sys.argv[1]):
        print(f"{step:6d} {loss:10.5f}")
