# The archive's bucket: Parquet files of all topics, and the workers' snapshots. Private, encrypted with a key of its own, TLS
# only, versioned, with lifecycle rules.

variable "name" { type = string }
variable "infrequent_days" { type = number }
variable "expire_days" { type = number }
variable "tags" { type = map(string) }

data "aws_caller_identity" "this" {}

resource "aws_kms_key" "archive" {
  description             = "${var.name}: archive"
  enable_key_rotation     = true
  deletion_window_in_days = 30
  tags                    = var.tags
}

resource "aws_s3_bucket" "archive" {
  bucket = "${var.name}-archive-${data.aws_caller_identity.this.account_id}"
  tags   = var.tags
}

resource "aws_s3_bucket_public_access_block" "archive" {
  bucket = aws_s3_bucket.archive.id

  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "archive" {
  bucket = aws_s3_bucket.archive.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_versioning" "archive" {
  bucket = aws_s3_bucket.archive.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "archive" {
  bucket = aws_s3_bucket.archive.id

  rule {
    bucket_key_enabled = true

    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = aws_kms_key.archive.arn
    }
  }
}

data "aws_iam_policy_document" "tls_only" {
  statement {
    sid       = "TlsOnly"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.archive.arn, "${aws_s3_bucket.archive.arn}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "archive" {
  bucket = aws_s3_bucket.archive.id
  policy = data.aws_iam_policy_document.tls_only.json
}

resource "aws_s3_bucket_lifecycle_configuration" "archive" {
  bucket = aws_s3_bucket.archive.id

  rule {
    id     = "archive"
    status = "Enabled"

    filter {
      prefix = "archive/"
    }

    transition {
      days          = var.infrequent_days
      storage_class = "STANDARD_IA"
    }

    dynamic "expiration" {
      for_each = var.expire_days > 0 ? [var.expire_days] : []

      content {
        days = expiration.value
      }
    }
  }

  # Compaction and snapshots replace files: what they replaced goes after a week, a broken upload after a day.
  rule {
    id     = "replaced"
    status = "Enabled"

    filter {}

    noncurrent_version_expiration {
      noncurrent_days = 7
    }

    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
  }
}

output "bucket" {
  value = aws_s3_bucket.archive.id
}

output "bucket_arn" {
  value = aws_s3_bucket.archive.arn
}

output "key_arn" {
  value = aws_kms_key.archive.arn
}
