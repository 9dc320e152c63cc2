"""The data plane: claims commands, runs their tools, stores results and reports their ends. It never routes."""
