//! Finds the agent for a command.

use crate::cli::args::Connection;
use crate::cli::error::CliError;
use longhaul_api::Client;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, SignatureScheme};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Returns a client of the agent named by the arguments, else by the environment, else of this
/// host's.
pub(crate) fn client(connection: &Connection) -> Result<Client, CliError> {
    if let Some(socket) = &connection.socket {
        return Ok(Client::unix(socket));
    }
    if let Some(address) = &connection.api {
        return over_tls(connection, address);
    }
    if let Some(socket) = environment("LONGHAUL_SOCKET") {
        return Ok(Client::unix(PathBuf::from(socket)));
    }
    match environment("LONGHAUL_API") {
        Some(address) => over_tls(connection, &address.to_string_lossy()),
        None => Ok(Client::unix(longhaul_api::SOCKET_DEFAULT)),
    }
}

fn environment(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn over_tls(connection: &Connection, address: &str) -> Result<Client, CliError> {
    let file = |given: &Option<PathBuf>, option: &str, variable: &str| {
        let file = given
            .clone()
            .or_else(|| environment(variable).map(PathBuf::from));
        file.ok_or_else(|| {
            CliError::usage(
                format!("--api needs {option} as well"),
                "the agent's machine has the file; docs/api.md says how to copy it",
            )
        })
    };
    let certificate = file(
        &connection.api_certificate,
        "--api-certificate",
        "LONGHAUL_API_CERTIFICATE",
    )?;
    let token_file = file(
        &connection.api_token_file,
        "--api-token-file",
        "LONGHAUL_API_TOKEN_FILE",
    )?;
    let cannot = |path: &Path, what: &dyn std::fmt::Display| {
        CliError::usage(
            format!("cannot use {}: {what}", path.display()),
            "docs/api.md says what the file holds",
        )
    };
    let token =
        std::fs::read_to_string(&token_file).map_err(|error| cannot(&token_file, &error))?;
    let pinned = CertificateDer::from_pem_file(&certificate)
        .map_err(|error| cannot(&certificate, &error))?;
    let config = tls_config(pinned).map_err(|error| cannot(&certificate, &error))?;
    Ok(Client::tls(address, Arc::new(config), token.trim()))
}

fn tls_config(pinned: CertificateDer<'static>) -> Result<ClientConfig, Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Pinned {
        certificate: pinned,
        provider: provider.clone(),
    };
    Ok(ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth())
}

/// Accepts one certificate, under any name of the agent.
#[derive(Debug)]
struct Pinned {
    certificate: CertificateDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if *end_entity == self.certificate {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(CertificateError::ApplicationVerificationFailure.into())
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}
