"""The backend `pytorch`: TorchScript and exported programs, with their state on the device."""
