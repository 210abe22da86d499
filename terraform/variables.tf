variable "name" {
  description = "Prefix of every resource, e.g. spanloop-prod."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{2,40}$", var.name))
    error_message = "name must be 3 to 41 lower-case letters, digits and hyphens, beginning with a letter."
  }
}

variable "vpc_id" {
  description = "VPC of the brokers and of what talks to them."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets of the brokers, one in each availability zone: two or three."
  type        = list(string)

  validation {
    condition     = contains([2, 3], length(var.subnet_ids))
    error_message = "MSK needs two or three subnets, each in another availability zone."
  }
}

variable "client_security_group_ids" {
  description = "Security groups of spanloop's processes: only these reach the brokers."
  type        = list(string)

  validation {
    condition     = length(var.client_security_group_ids) > 0
    error_message = "Give at least one security group, else nobody reaches the brokers."
  }
}

variable "topic_prefix" {
  description = "The same as kafka.prefix in spanloop's settings: the roles may touch these topics only."
  type        = string
  default     = "spanloop."

  validation {
    condition     = can(regex("^[A-Za-z0-9._-]+$", var.topic_prefix))
    error_message = "topic_prefix must not be empty and may hold letters, digits, dots, underscores and hyphens."
  }
}

variable "broker_instance_type" {
  description = "MSK broker size."
  type        = string
  default     = "kafka.m7g.large"
}

variable "broker_volume_gib" {
  description = "Disk of each broker. A week of 1,000 spans/s at 2 kB and replication 3 is about 1.2 TB a broker of three."
  type        = number
  default     = 500
}

variable "archive_infrequent_days" {
  description = "Archive files move to the infrequent-access class after so many days."
  type        = number
  default     = 30

  validation {
    condition     = var.archive_infrequent_days >= 30
    error_message = "S3 moves nothing to STANDARD_IA before 30 days."
  }
}

variable "archive_expire_days" {
  description = "Archive files are deleted after so many days; 0 keeps them."
  type        = number
  default     = 0
}

variable "subjects" {
  description = "OIDC subjects (system:serviceaccount:NAMESPACE:NAME) that may take each role, e.g. on EKS."
  type = object({
    collector = list(string)
    worker    = list(string)
    learner   = list(string)
    reader    = list(string)
  })
}

variable "oidc_provider_arn" {
  description = "ARN of the cluster's OIDC provider."
  type        = string
}

variable "oidc_issuer" {
  description = "Issuer of the same provider, without https://."
  type        = string
}

variable "tags" {
  description = "Tags of every resource."
  type        = map(string)
  default     = {}
}
