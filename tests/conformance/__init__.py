"""Independent clients and checkers against gateway and replica."""
