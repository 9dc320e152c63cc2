"""The data plane: claims commands, runs their tools, stores results and reports what happened. Never routes."""
