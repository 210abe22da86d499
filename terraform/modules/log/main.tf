# Kafka: MSK in KRaft mode, TLS only, IAM only, encrypted at rest with a key of its own, reachable from the given groups only.

variable "name" { type = string }
variable "vpc_id" { type = string }
variable "subnet_ids" { type = list(string) }
variable "client_security_group_ids" { type = list(string) }
variable "instance_type" { type = string }
variable "volume_gib" { type = number }
variable "tags" { type = map(string) }

locals {
  iam_port   = 9098
  min_in_syn = length(var.subnet_ids) - 1
}

resource "aws_kms_key" "log" {
  description             = "${var.name}: brokers' disks"
  enable_key_rotation     = true
  deletion_window_in_days = 30
  tags                    = var.tags
}

resource "aws_security_group" "brokers" {
  name_prefix = "${var.name}-brokers-"
  description = "Kafka brokers of ${var.name}"
  vpc_id      = var.vpc_id
  tags        = var.tags

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "clients" {
  for_each = toset(var.client_security_group_ids)

  security_group_id            = aws_security_group.brokers.id
  referenced_security_group_id = each.value
  description                  = "Kafka with IAM from ${each.value}"
  ip_protocol                  = "tcp"
  from_port                    = local.iam_port
  to_port                      = local.iam_port
}

resource "aws_cloudwatch_log_group" "brokers" {
  name              = "/${var.name}/brokers"
  retention_in_days = 30
  tags              = var.tags
}

resource "aws_msk_configuration" "log" {
  name           = "${var.name}-log"
  kafka_versions = ["3.9.x.kraft"]

  # Sources of truth: nothing is lost by an unclean election, nothing is created by a misspelt name.
  server_properties = <<-EOT
    auto.create.topics.enable=false
    default.replication.factor=${length(var.subnet_ids)}
    min.insync.replicas=${local.min_in_syn}
    unclean.leader.election.enable=false
    message.max.bytes=1048588
    log.retention.hours=168
  EOT
}

resource "aws_msk_cluster" "log" {
  cluster_name           = var.name
  kafka_version          = "3.9.x.kraft"
  number_of_broker_nodes = length(var.subnet_ids)
  enhanced_monitoring    = "PER_TOPIC_PER_BROKER"
  tags                   = var.tags

  broker_node_group_info {
    instance_type   = var.instance_type
    client_subnets  = var.subnet_ids
    security_groups = [aws_security_group.brokers.id]

    storage_info {
      ebs_storage_info {
        volume_size = var.volume_gib
      }
    }
  }

  configuration_info {
    arn      = aws_msk_configuration.log.arn
    revision = aws_msk_configuration.log.latest_revision
  }

  client_authentication {
    unauthenticated = false

    sasl {
      iam = true
    }
  }

  encryption_info {
    encryption_at_rest_kms_key_arn = aws_kms_key.log.arn

    encryption_in_transit {
      client_broker = "TLS"
      in_cluster    = true
    }
  }

  logging_info {
    broker_logs {
      cloudwatch_logs {
        enabled   = true
        log_group = aws_cloudwatch_log_group.brokers.name
      }
    }
  }
}

output "cluster_arn" {
  value = aws_msk_cluster.log.arn
}

output "bootstrap_servers" {
  value = aws_msk_cluster.log.bootstrap_brokers_sasl_iam
}
