"""What tests share: servers, devices, certificates, scripted peers, waiting."""
