"""Run in an environment with torch alone: the library imports, trains, saves and loads."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    import torch

    import rootfree

    for name in ("numpy", "rich", "typer", "sklearn", "optuna"):
        assert importlib.util.find_spec(name) is None, f"{name} is here: this proves nothing"
    assert "site-packages" in rootfree.__file__, rootfree.__file__
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    y = torch.tanh(x @ torch.randn(6, 2))
    for method in ("RFRMSprop", "RFAdamW", "RFShampoo", "IFShampoo", "IFWhitening"):
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        counts = {} if method == "IFWhitening" else {"batch_size": 64}
        optimizer = getattr(rootfree, method)(model.parameters(), **counts)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.9 * losses[0], (method, losses[0], losses[-1])
        optimizer.load_state_dict(optimizer.state_dict())
    assert "rootfree_lab" not in sys.modules
    print(f"rootfree {rootfree.__version__} with torch alone")


if __name__ == "__main__":
    main()
