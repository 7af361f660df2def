"""A Decision Transformer (Chen et al., 2021, arXiv:2106.01345) on a store:

python decision_transformer.py pendulum.exp
"""

import sys

import gymnasium
import numpy as np
import pendulum
import torch
from torch import nn

import expstore

LENGTH, WIDTH, HEADS, LAYERS = 20, 64, 2, 2
SCALE = 100.0  # returns are divided by it
LONGEST = 200  # steps of an episode


class DecisionTransformer(nn.Module):
    """Tokens are (return to go, state, action) for each step; states predict their actions."""

    def __init__(self, states: int, actions: int, most: float) -> None:
        super().__init__()
        self.most = most
        self.embed = nn.ModuleList(nn.Linear(size, WIDTH) for size in (1, states, actions))
        self.time = nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, actions), nn.Tanh())
        size = 3 * LENGTH
        self.register_buffer("later", torch.ones(size, size).triu(1).bool())

    def forward(self, to_go, states, actions, times) -> torch.Tensor:
        """(B, W, ...) each; padding is on the right, where no earlier step looks."""
        parts = (to_go[..., None] / SCALE, states, actions)
        tokens = [e(x) + self.time(times) for e, x in zip(self.embed, parts, strict=True)]
        sequence = torch.stack(tokens, 2).flatten(1, 2)
        size = sequence.shape[1]
        hidden = self.body(sequence, mask=self.later[:size, :size])
        return self.most * self.head(hidden[:, 1::3])


def episode_return(model, mean, std, target: float, seed: int) -> float:
    """Act with the wish for a return, which rewards are taken off from."""
    with gymnasium.make(pendulum.ENV_ID) as env, torch.no_grad():
        observation, _ = env.reset(seed=seed)
        states, actions, to_go, total, done = [], [], [target], 0.0, False
        while not done:
            states.append((np.asarray(observation, np.float32) - mean) / std)
            actions.append(np.zeros(env.action_space.shape, np.float32))
            first = max(0, len(states) - LENGTH)
            window = (np.array(column[first:], np.float32) for column in (to_go, states, actions))
            times = torch.arange(first, len(states))[None]
            found = model(*(torch.from_numpy(column)[None] for column in window), times)
            actions[-1] = found[0, -1].numpy()
            observation, reward, terminated, truncated, _ = env.step(actions[-1])
            total += float(reward)
            to_go.append(to_go[-1] - float(reward))
            done = terminated or truncated
    return total


def train(
    path: str, steps: int = 1_000, every: int = 100, seed: int = 0, episodes: int = 5
) -> list[tuple[int, float]]:
    """Returns (gradient steps, mean return when asked for the best one) at every evaluation."""
    torch.manual_seed(seed)
    store = expstore.open(path)
    data = expstore.OfflineDataset(store, prefetch=2)
    found = data.statistics("observation")
    mean, std = found.mean.astype(np.float32), (found.std + 1e-3).astype(np.float32)
    model = DecisionTransformer(mean.size, data.statistics("action").mean.size, most=2.0)
    step_of = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=1e-4)
    best = float(np.quantile(store.episodes["return"], 0.95))
    windows = data.normalize("observation").trajectories(64, LENGTH, seed=seed)
    curve = []
    for step in range(steps + 1):
        if step % every == 0:
            returns = [episode_return(model, mean, std, best, 1000 + k) for k in range(episodes)]
            curve.append((step, float(np.mean(returns))))
        window = next(windows)
        names = ("returns_to_go", "observations", "actions", "timesteps")
        chosen = model(*(window[name] for name in names))
        mask = window["mask"]
        loss = (chosen - window["actions"])[mask].square().mean()
        step_of.zero_grad()
        loss.backward()
        step_of.step()
    windows.close()
    return curve


if __name__ == "__main__":
    for step, value in train(sys.argv[1]):
        print(f"{step:6d} {value:8.1f}")
