//! Provides the API's certificate for TCP: the administrator's, or one that the agent generates.

use longhaul_migration::host::config::TcpConfig;
use longhaul_migration::host::start_error::StartError;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The files of the generated certificate and key in the state folder.
const CERTIFICATE_FILE: &str = "api-certificate.pem";
const KEY_FILE: &str = "api-key.pem";

/// Returns the TLS configuration of the TCP socket.
pub(crate) fn server_config(tcp: &TcpConfig, state: &Path) -> Result<ServerConfig, StartError> {
    let (certificate, key) = match (&tcp.certificate, &tcp.key) {
        (Some(certificate), Some(key)) => (certificate.clone(), key.clone()),
        (None, None) => own(state)?,
        _ => {
            return Err(StartError::new(
                "the configuration has one of `api.tcp.certificate` and `api.tcp.key`",
            )
            .hint("name both files, or none: then the agent makes its own"));
        }
    };
    let error = |path: &Path, what: &dyn std::fmt::Display| {
        StartError::new(format!("cannot use {}: {what}", path.display()))
    };
    let chain: Vec<_> = CertificateDer::pem_file_iter(&certificate)
        .and_then(Iterator::collect)
        .map_err(|other| error(&certificate, &other))?;
    let private = PrivateKeyDer::from_pem_file(&key).map_err(|other| error(&key, &other))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| {
            builder
                .with_no_client_auth()
                .with_single_cert(chain, private)
        })
        .map_err(|other| error(&certificate, &other))
}

/// Returns the agent's own certificate and key, generated at the first start.
fn own(state: &Path) -> Result<(PathBuf, PathBuf), StartError> {
    let (certificate, key) = (state.join(CERTIFICATE_FILE), state.join(KEY_FILE));
    if !certificate.exists() || !key.exists() {
        let error = |what: &dyn std::fmt::Display| {
            StartError::new(format!("cannot make the API's certificate: {what}"))
        };
        let pair = KeyPair::generate().map_err(|other| error(&other))?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::CommonName, "longhaul agent");
        let made = params.self_signed(&pair).map_err(|other| error(&other))?;
        write(&key, &pair.serialize_pem()).map_err(|other| error(&other))?;
        write(&certificate, &made.pem()).map_err(|other| error(&other))?;
    }
    Ok((certificate, key))
}

fn write(path: &Path, text: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}
