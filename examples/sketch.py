"""Train a classifier whose changes travel as a sketch: FedSep against averaging without compression."""

from __future__ import annotations

import fedbilevel as fb


def main() -> None:
    """Ten clients; a linear classifier of 7,850 numbers, of which 300 travel."""
    digits = fb.data.load("mnist-mini")
    clients = fb.data.federate(digits, fb.data.Iid(clients=10), batch_size=32)
    problem = fb.Classification(fb.Linear(10), inputs=(28, 28, 1), classes=10, test=digits.test)
    learn = fb.SGD(0.1)
    methods = {
        "FedSep": fb.FedSep(
            decoder=fb.LinearSketch(300, "srht"), learn=learn, learn_steps=5, server_lr="auto"
        ),
        "uncompressed": fb.CompressedFedAvg(learn, learn_steps=5),
    }
    for name, method in methods.items():
        result = fb.solve(problem, clients, method, steps=30)
        last = result.history[-1]
        print(f"{name}: {last['test_accuracy']:.1%} of the test samples, {result.ledger.bytes:,} bytes")


if __name__ == "__main__":
    main()
