# The parts of a spanloop deployment that AWS keeps: Kafka (MSK), the archive's bucket, and one role for each kind of process.
# The processes themselves run wherever you run containers; infra/ has their image and settings.

module "log" {
  source = "./modules/log"

  name                      = var.name
  vpc_id                    = var.vpc_id
  subnet_ids                = var.subnet_ids
  client_security_group_ids = var.client_security_group_ids
  instance_type             = var.broker_instance_type
  volume_gib                = var.broker_volume_gib
  tags                      = var.tags
}

module "archive" {
  source = "./modules/archive"

  name            = var.name
  infrequent_days = var.archive_infrequent_days
  expire_days     = var.archive_expire_days
  tags            = var.tags
}

module "access" {
  source = "./modules/access"

  name              = var.name
  cluster_arn       = module.log.cluster_arn
  topic_prefix      = var.topic_prefix
  bucket_arn        = module.archive.bucket_arn
  key_arn           = module.archive.key_arn
  oidc_provider_arn = var.oidc_provider_arn
  oidc_issuer       = var.oidc_issuer
  subjects          = var.subjects
  tags              = var.tags
}
