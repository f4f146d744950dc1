"""Files of datasets: where they are, how they come here, and how they are written whole or not at all."""
