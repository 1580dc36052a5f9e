//! Configures OpenVPN with TAP interfaces, in its user-space data channel.

use std::path::PathBuf;

use super::version_of;
use crate::bench::network::ground::{Ground, INNER, INNER_ADDRESSES, Tunnel, program};
use crate::bench::network::system::{Kind, System};
use longhaul_lab::error::LabError;
use longhaul_lab::netns;
use longhaul_lab::process;

/// OpenVPN joins Ethernet segments by TAP in user space alone: its kernel module carries IP.
pub(in crate::bench::network) struct OpenVpn;

impl System for OpenVpn {
    fn name(&self) -> &'static str {
        "openvpn-tap"
    }

    fn kind(&self) -> Kind {
        Kind::Layer2
    }

    fn version(&self) -> Result<String, String> {
        program("openssl", "openssl")?;
        version_of(&program("openvpn", "openvpn")?, &["--version"])
    }

    fn start(&self, ground: &Ground) -> Result<Tunnel, LabError> {
        let program = program("openvpn", "openvpn").map_err(LabError::Which)?;
        let outer = ground.outer()?;
        let keys = [certificate(ground, 0)?, certificate(ground, 1)?];
        let mut tunnel = Tunnel::new(INNER_ADDRESSES, INNER);
        for host in [1, 0] {
            let (own, other) = (&keys[host], &keys[1 - host]);
            let role = ["tls-client", "tls-server\ndh none"][host];
            // Two sites with the fingerprints of each other's certificates, as the manual's
            // example; AES-256-GCM is what both would agree on with a processor that has AES.
            // `fast-io` saves a system call for each datagram. TCP's segments are limited to what
            // fits the way (`mssfix`, a default), so nothing is fragmented.
            let text = format!(
                "dev {INNER}\ndev-type tap\nproto udp4\nlport 1194\n\
                 remote {} 1194\nlocal {}\n{role}\ncert {}\nkey {}\n\
                 peer-fingerprint \"{}\"\ndata-ciphers AES-256-GCM\nallow-compression no\n\
                 ifconfig {} 255.255.255.0\nfast-io\ntxqueuelen 1000\nverb 3\n",
                outer[1 - host],
                outer[host],
                own.certificate.display(),
                own.key.display(),
                other.fingerprint,
                INNER_ADDRESSES[host],
            );
            let file = ground.file(host, "openvpn/openvpn.conf", &text)?;
            let mut command = netns::command(&program);
            command.arg("--config").arg(file);
            ground.start(&mut tunnel, host, command)?;
        }
        Ok(tunnel)
    }
}

struct Certificate {
    certificate: PathBuf,
    key: PathBuf,
    fingerprint: String,
}

/// Makes a self-signed certificate, as OpenVPN's page on fingerprints does.
fn certificate(ground: &Ground, host: usize) -> Result<Certificate, LabError> {
    let certificate = ground.file(host, "openvpn/cert.pem", "")?;
    let key = ground.file(host, "openvpn/key.pem", "")?;
    let mut make = netns::command("openssl");
    make.args(["req", "-x509", "-newkey", "ec", "-pkeyopt"])
        .args(["ec_paramgen_curve:secp384r1", "-nodes", "-sha256"])
        .args([
            "-days",
            "30",
            "-subj",
            &format!("/CN=host-{host}"),
            "-keyout",
        ])
        .arg(&key)
        .arg("-out")
        .arg(&certificate);
    process::run(&mut make)?;
    let mut show = netns::command("openssl");
    show.args(["x509", "-fingerprint", "-sha256", "-noout", "-in"])
        .arg(&certificate);
    let said = process::run(&mut show)?;
    let fingerprint = said.split_once('=').map(|(_, it)| it.trim().to_owned());
    Ok(Certificate {
        fingerprint: fingerprint.ok_or_else(|| LabError::Answer {
            what: "openssl".to_owned(),
            message: format!("no fingerprint in `{}`", said.trim()),
        })?,
        certificate,
        key,
    })
}
