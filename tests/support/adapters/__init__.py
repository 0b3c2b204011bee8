"""Files of LoRAs for tests."""
