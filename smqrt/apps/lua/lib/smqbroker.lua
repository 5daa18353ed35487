-- require "smqbroker": a deprecated name of smq.broker.
return require "smq.broker"
