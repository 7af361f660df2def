"""TD3+BC (Fujimoto and Gu, 2021, arXiv:2106.06860) on a store: python td3_bc.py pendulum.exp"""

import copy
import sys

import pendulum
import torch
from torch import nn

import expstore

GAMMA, TAU, ALPHA = 0.99, 0.005, 2.5
NOISE, CLIP, DELAY = 0.2, 0.5, 2  # of target actions; the actor learns every second step


def network(inputs: int, outputs: int, width: int = 128) -> nn.Sequential:
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class Agent:
    def __init__(self, data: expstore.OfflineDataset, most: float) -> None:
        observations, actions = data.statistics("observation"), data.statistics("action")
        states, self.most = observations.mean.size, most
        self.mean = torch.from_numpy(observations.mean).float()
        self.std = torch.from_numpy(observations.std + 1e-3).float()
        size = actions.mean.size
        self.actor = network(states, size)
        self.critics = nn.ModuleList(network(states + size, 1) for _ in range(2))
        self.old_actor, self.old_critics = map(copy.deepcopy, (self.actor, self.critics))
        self.actor_step = torch.optim.Adam(self.actor.parameters(), 1e-3)
        self.critic_step = torch.optim.Adam(self.critics.parameters(), 1e-3)
        self.num_steps = 0

    def act(self, observation) -> list[float]:
        with torch.no_grad():
            state = (torch.as_tensor(observation) - self.mean) / self.std
            return (self.most * torch.tanh(self.actor(state))).numpy()

    def learn(self, batch: dict[str, torch.Tensor]) -> float:
        states, actions = batch["observations"], batch["actions"]
        with torch.no_grad():
            noise = (torch.randn_like(actions) * NOISE).clamp(-CLIP, CLIP) * self.most
            after = self.most * torch.tanh(self.old_actor(batch["next_observations"]))
            pair = torch.cat(
                [batch["next_observations"], (after + noise).clamp(-self.most, self.most)], 1
            )
            value = torch.min(*(critic(pair) for critic in self.old_critics)).squeeze(1)
            # Only a termination is worth nothing afterwards; a timeout is not.
            goes_on = 1 - batch["terminals"].float()
            target = batch["rewards"].float() + GAMMA * goes_on * value
        pair = torch.cat([states, actions], 1)
        loss = sum((critic(pair).squeeze(1) - target).square().mean() for critic in self.critics)
        self.critic_step.zero_grad()
        loss.backward()
        self.critic_step.step()
        self.num_steps += 1
        if self.num_steps % DELAY == 0:
            self._improve(states, actions)
        return float(loss.detach())

    def _improve(self, states: torch.Tensor, actions: torch.Tensor) -> None:
        ours = self.most * torch.tanh(self.actor(states))
        value = self.critics[0](torch.cat([states, ours], 1))
        scale = ALPHA / value.abs().mean().detach()
        loss = -scale * value.mean() + (ours - actions).square().mean()
        self.actor_step.zero_grad()
        loss.backward()
        self.actor_step.step()
        for new, old in ((self.actor, self.old_actor), (self.critics, self.old_critics)):
            for source, target in zip(new.parameters(), old.parameters(), strict=True):
                target.data.lerp_(source.data, TAU)


def train(
    path: str, steps: int = 600, every: int = 100, seed: int = 0, episodes: int = 5
) -> list[tuple[int, float]]:
    """Returns (gradient steps, mean return) at every evaluation."""
    torch.manual_seed(seed)
    data = expstore.OfflineDataset(expstore.open(path), prefetch=2)
    agent = Agent(data, most=2.0)
    curve = [(0, pendulum.mean_return(agent.act, episodes))]
    batches = data.normalize("observation").batches(256, seed=seed)
    for step in range(1, steps + 1):
        agent.learn(next(batches))
        if step % every == 0:
            curve.append((step, pendulum.mean_return(agent.act, episodes)))
    batches.close()
    return curve


if __name__ == "__main__":
    for step, value in train(sys.argv[1]):
        print(f"{step:6d} {value:8.1f}")
