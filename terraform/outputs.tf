output "bootstrap_servers" {
  description = "SPANLOOP_BOOTSTRAP_SERVERS: brokers with TLS and IAM."
  value       = module.log.bootstrap_servers
}

output "archive_url" {
  description = "SPANLOOP_ARCHIVE__URL."
  value       = "s3://${module.archive.bucket}/archive"
}

output "snapshots_url" {
  description = "SPANLOOP_PROCESS__SNAPSHOTS."
  value       = "s3://${module.archive.bucket}/snapshots"
}

output "role_arns" {
  description = "Role of each kind of process."
  value       = module.access.role_arns
}
