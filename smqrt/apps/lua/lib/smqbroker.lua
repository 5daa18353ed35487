-- require "smqbroker": the oldest name of smq.broker.
return require "smq.broker"
