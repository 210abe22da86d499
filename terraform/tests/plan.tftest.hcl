# Runs without AWS: every provider call is mocked. `terraform init && terraform test`

mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = {
      account_id = "123456789012"
    }
  }

  mock_resource "aws_msk_cluster" {
    defaults = {
      arn                        = "arn:aws:kafka:eu-west-1:123456789012:cluster/spanloop-test/abcd-1"
      bootstrap_brokers_sasl_iam = "b-1.test:9098,b-2.test:9098"
    }
  }

  mock_resource "aws_msk_configuration" {
    defaults = {
      arn             = "arn:aws:kafka:eu-west-1:123456789012:configuration/spanloop-test/abcd-1"
      latest_revision = 1
    }
  }

  mock_resource "aws_s3_bucket" {
    defaults = {
      arn = "arn:aws:s3:::spanloop-test-archive-123456789012"
    }
  }

  mock_resource "aws_kms_key" {
    defaults = {
      arn = "arn:aws:kms:eu-west-1:123456789012:key/11111111-2222-3333-4444-555555555555"
    }
  }

  mock_resource "aws_iam_role" {
    defaults = {
      arn = "arn:aws:iam::123456789012:role/spanloop-test"
    }
  }

  mock_data "aws_iam_policy_document" {
    defaults = {
      json = "{\"Version\":\"2012-10-17\",\"Statement\":[]}"
    }
  }
}

variables {
  name                      = "spanloop-test"
  vpc_id                    = "vpc-1"
  subnet_ids                = ["subnet-a", "subnet-b", "subnet-c"]
  client_security_group_ids = ["sg-1"]
  oidc_provider_arn         = "arn:aws:iam::123456789012:oidc-provider/issuer.test"
  oidc_issuer               = "issuer.test"
  subjects = {
    collector = ["system:serviceaccount:spanloop:collector"]
    worker    = ["system:serviceaccount:spanloop:worker"]
    learner   = ["system:serviceaccount:spanloop:learner"]
    reader    = ["system:serviceaccount:spanloop:reader"]
  }
}

run "log_is_private_and_loses_nothing" {
  module {
    source = "./modules/log"
  }

  variables {
    instance_type = "kafka.m7g.large"
    volume_gib    = 100
    tags          = {}
  }

  assert {
    condition     = aws_msk_cluster.log.client_authentication[0].unauthenticated == false && aws_msk_cluster.log.client_authentication[0].sasl[0].iam
    error_message = "Only IAM identities may connect."
  }

  assert {
    condition     = aws_msk_cluster.log.encryption_info[0].encryption_in_transit[0].client_broker == "TLS"
    error_message = "Traffic must be TLS."
  }

  assert {
    condition     = strcontains(aws_msk_configuration.log.server_properties, "min.insync.replicas=2") && strcontains(aws_msk_configuration.log.server_properties, "unclean.leader.election.enable=false")
    error_message = "An acknowledged record must survive the loss of a broker."
  }

  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.clients) == 1 && alltrue([for rule in aws_vpc_security_group_ingress_rule.clients : rule.cidr_ipv4 == null])
    error_message = "Only the named groups may reach the brokers, no address range."
  }
}

run "archive_is_private_encrypted_and_aged" {
  module {
    source = "./modules/archive"
  }

  variables {
    infrequent_days = 30
    expire_days     = 400
    tags            = {}
  }

  assert {
    condition     = aws_s3_bucket_public_access_block.archive.block_public_policy && aws_s3_bucket_public_access_block.archive.restrict_public_buckets
    error_message = "The bucket must not become public."
  }

  assert {
    condition     = one([for rule in aws_s3_bucket_server_side_encryption_configuration.archive.rule : rule.apply_server_side_encryption_by_default[0].sse_algorithm]) == "aws:kms"
    error_message = "Files must be encrypted with the archive's own key."
  }

  assert {
    condition     = aws_s3_bucket_lifecycle_configuration.archive.rule[0].expiration[0].days == 400 && aws_s3_bucket_lifecycle_configuration.archive.rule[1].noncurrent_version_expiration[0].noncurrent_days == 7
    error_message = "Lifecycle rules must age files out."
  }
}

run "files_are_kept_unless_told_otherwise" {
  module {
    source = "./modules/archive"
  }

  variables {
    infrequent_days = 30
    expire_days     = 0
    tags            = {}
  }

  assert {
    condition     = length(aws_s3_bucket_lifecycle_configuration.archive.rule[0].expiration) == 0
    error_message = "expire_days = 0 keeps the archive."
  }
}

run "each_role_has_its_own_topics" {
  module {
    source = "./modules/access"
  }

  variables {
    cluster_arn  = "arn:aws:kafka:eu-west-1:123456789012:cluster/spanloop-test/abcd-1"
    topic_prefix = "spanloop."
    bucket_arn   = "arn:aws:s3:::archive"
    key_arn      = "arn:aws:kms:eu-west-1:123456789012:key/1"
    tags         = {}
  }

  assert {
    condition     = !contains(flatten([for s in data.aws_iam_policy_document.process["collector"].statement : s.resources]), "*")
    error_message = "No role may name every resource."
  }

  assert {
    condition = alltrue(flatten([
      for kind, document in data.aws_iam_policy_document.process : [
        for s in document.statement : !contains(s.actions, "kafka-cluster:*") && !contains(s.actions, "s3:*") && !contains(s.resources, "*")
      ]
    ]))
    error_message = "No role may use wildcards for actions or resources."
  }

  assert {
    condition = toset(flatten([
      for s in data.aws_iam_policy_document.process["learner"].statement : s.resources if s.sid == "Append"
    ])) == toset(["arn:aws:kafka:eu-west-1:123456789012:topic/spanloop-test/abcd-1/spanloop.policies"])
    error_message = "The learner appends policies and nothing else."
  }

  assert {
    condition     = length([for s in data.aws_iam_policy_document.process["collector"].statement : s if startswith(s.sid, "WriteFiles") || startswith(s.sid, "ReadFiles")]) == 0
    error_message = "The collector has no business in the bucket."
  }

  assert {
    condition     = length([for s in data.aws_iam_policy_document.process["reader"].statement : s if contains(s.actions, "s3:PutObject") || contains(s.actions, "kafka-cluster:WriteData")]) == 0
    error_message = "The reader writes nothing."
  }
}

run "whole_deployment" {
  command = apply

  assert {
    condition     = output.bootstrap_servers == "b-1.test:9098,b-2.test:9098"
    error_message = "The brokers' addresses must come out."
  }

  assert {
    condition     = toset(keys(output.role_arns)) == toset(["collector", "worker", "learner", "reader"])
    error_message = "One role for each kind of process."
  }
}

run "two_zones_at_least" {
  command = plan

  variables {
    subnet_ids = ["subnet-a"]
  }

  expect_failures = [var.subnet_ids]
}
