"""`python -m benchmarks` is `scripts/bench`."""

from benchmarks.main import main

if __name__ == "__main__":
    main()
