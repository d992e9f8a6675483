"""What the gateway knows of its replicas, and how it reaches them."""
