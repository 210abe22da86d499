# One role for each kind of process, each with no more than it uses:
#   collector  appends spans, feedback, dead letters; reads policies (the gateway routes by them)
#   worker     reads and appends every topic but policies; reads and writes snapshots and archive
#   learner    reads samples, appends policies
#   reader     reads the archive (queries, replays)

variable "name" { type = string }
variable "cluster_arn" { type = string }
variable "topic_prefix" { type = string }
variable "bucket_arn" { type = string }
variable "key_arn" { type = string }
variable "oidc_provider_arn" { type = string }
variable "oidc_issuer" { type = string }
variable "subjects" { type = map(list(string)) }
variable "tags" { type = map(string) }

locals {
  # arn:aws:kafka:REGION:ACCOUNT:cluster/NAME/UUID -> the same with topic or group instead of cluster
  topics = replace(var.cluster_arn, ":cluster/", ":topic/")
  groups = "${replace(var.cluster_arn, ":cluster/", ":group/")}/*"

  reads = {
    collector = ["policies"]
    worker    = ["spans", "feedback", "operations", "lessons", "models", "orchestrations", "rewards", "credits", "samples", "dead_letters", "policies"]
    learner   = ["samples", "policies", "models"]
    reader    = []
  }
  writes = {
    collector = ["spans", "feedback", "dead_letters"]
    worker    = ["operations", "lessons", "models", "orchestrations", "rewards", "credits", "samples", "dead_letters"]
    learner   = ["policies"]
    reader    = []
  }
  creates = ["worker"]
  bucket = {
    worker = { read = ["archive/*", "snapshots/*"], write = ["archive/*", "snapshots/*"] }
    reader = { read = ["archive/*"], write = [] }
  }
}

data "aws_iam_policy_document" "assume" {
  for_each = var.subjects

  statement {
    actions = ["sts:AssumeRoleWithWebIdentity"]

    principals {
      type        = "Federated"
      identifiers = [var.oidc_provider_arn]
    }

    condition {
      test     = "StringEquals"
      variable = "${var.oidc_issuer}:sub"
      values   = each.value
    }

    condition {
      test     = "StringEquals"
      variable = "${var.oidc_issuer}:aud"
      values   = ["sts.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "process" {
  for_each = var.subjects

  dynamic "statement" {
    for_each = length(local.reads[each.key]) + length(local.writes[each.key]) > 0 ? [1] : []

    content {
      sid       = "Connect"
      actions   = ["kafka-cluster:Connect", "kafka-cluster:DescribeCluster"]
      resources = [var.cluster_arn]
    }
  }

  dynamic "statement" {
    for_each = length(local.reads[each.key]) > 0 ? [1] : []

    content {
      sid       = "Read"
      actions   = ["kafka-cluster:DescribeTopic", "kafka-cluster:ReadData"]
      resources = [for topic in local.reads[each.key] : "${local.topics}/${var.topic_prefix}${topic}"]
    }
  }

  dynamic "statement" {
    for_each = length(local.writes[each.key]) > 0 ? [1] : []

    content {
      sid       = "Append"
      actions   = ["kafka-cluster:DescribeTopic", "kafka-cluster:WriteData"]
      resources = [for topic in local.writes[each.key] : "${local.topics}/${var.topic_prefix}${topic}"]
    }
  }

  dynamic "statement" {
    for_each = contains(local.creates, each.key) ? [1] : []

    content {
      sid       = "Create"
      actions   = ["kafka-cluster:CreateTopic", "kafka-cluster:DescribeTopicDynamicConfiguration"]
      resources = ["${local.topics}/${var.topic_prefix}*"]
    }
  }

  dynamic "statement" {
    for_each = length(local.reads[each.key]) > 0 ? [1] : []

    content {
      sid       = "Group"
      actions   = ["kafka-cluster:DescribeGroup", "kafka-cluster:AlterGroup"]
      resources = [local.groups]
    }
  }

  dynamic "statement" {
    for_each = length(local.writes[each.key]) > 0 ? [1] : []

    content {
      sid       = "Idempotent"
      actions   = ["kafka-cluster:WriteDataIdempotently"]
      resources = [var.cluster_arn]
    }
  }

  dynamic "statement" {
    for_each = contains(keys(local.bucket), each.key) ? [local.bucket[each.key]] : []

    content {
      sid       = "ReadFiles"
      actions   = ["s3:GetObject"]
      resources = [for path in statement.value.read : "${var.bucket_arn}/${path}"]
    }
  }

  dynamic "statement" {
    for_each = contains(keys(local.bucket), each.key) ? [local.bucket[each.key]] : []

    content {
      sid       = "ListFiles"
      actions   = ["s3:ListBucket"]
      resources = [var.bucket_arn]

      condition {
        test     = "StringLike"
        variable = "s3:prefix"
        values   = statement.value.read
      }
    }
  }

  dynamic "statement" {
    for_each = contains(keys(local.bucket), each.key) && length(try(local.bucket[each.key].write, [])) > 0 ? [local.bucket[each.key]] : []

    content {
      sid       = "WriteFiles"
      actions   = ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
      resources = [for path in statement.value.write : "${var.bucket_arn}/${path}"]
    }
  }

  dynamic "statement" {
    for_each = contains(keys(local.bucket), each.key) ? [local.bucket[each.key]] : []

    content {
      sid       = "Key"
      actions   = length(statement.value.write) > 0 ? ["kms:Decrypt", "kms:GenerateDataKey"] : ["kms:Decrypt"]
      resources = [var.key_arn]
    }
  }
}

resource "aws_iam_role" "process" {
  for_each = var.subjects

  name               = "${var.name}-${each.key}"
  assume_role_policy = data.aws_iam_policy_document.assume[each.key].json
  tags               = var.tags
}

resource "aws_iam_role_policy" "process" {
  for_each = var.subjects

  name   = each.key
  role   = aws_iam_role.process[each.key].id
  policy = data.aws_iam_policy_document.process[each.key].json
}

output "role_arns" {
  value = { for kind, role in aws_iam_role.process : kind => role.arn }
}

output "policies" {
  description = "Policy of each role as JSON, for tests and audits."
  value       = { for kind, document in data.aws_iam_policy_document.process : kind => document.json }
}
