//! Configures Nebula: each host knows the other's address.

use std::path::PathBuf;

use super::version_of;
use crate::bench::network::ground::{Ground, INNER, INNER_ADDRESSES, Tunnel, program};
use crate::bench::network::system::{Kind, System};
use longhaul_lab::error::LabError;
use longhaul_lab::netns;
use longhaul_lab::process;

const PORT: u16 = 4242;
/// What fits a way of 1500 bytes without fragments: less IPv4, UDP, Nebula's header and its tag.
/// (Its default of 1300 is for ways that are not known.)
const MTU: u32 = 1500 - 20 - 8 - 16 - 16;

/// Nebula with AES-GCM, the buffers of its example, and one queue, which is its default. From
/// version 1.12 on it has the offloads of TUN and UDP, which have to be turned on; older versions
/// ignore these settings.
pub(in crate::bench::network) struct Nebula;

impl System for Nebula {
    fn name(&self) -> &'static str {
        "nebula"
    }

    fn kind(&self) -> Kind {
        Kind::Layer3
    }

    fn version(&self) -> Result<String, String> {
        program("nebula-cert", "nebula")?;
        version_of(&program("nebula", "nebula")?, &["-version"])
    }

    fn start(&self, ground: &Ground) -> Result<Tunnel, LabError> {
        let program = program("nebula", "nebula").map_err(LabError::Which)?;
        let outer = ground.outer()?;
        let certificates = Certificates::make(ground)?;
        let mut tunnel = Tunnel::new(INNER_ADDRESSES, INNER);
        for host in [1, 0] {
            let (certificate, key) = &certificates.hosts[host];
            let socket = certificate.with_extension("sock");
            let text = format!(
                "pki:\n  ca: {}\n  cert: {}\n  key: {}\n\
                 static_host_map:\n  \"{}\": [\"{}:{PORT}\"]\n\
                 lighthouse:\n  am_lighthouse: false\n\
                 listen:\n  host: {}\n  port: {PORT}\n  read_buffer: 3412512\n  \
                 write_buffer: 3412512\n  udp_offloads: true\n\
                 local_api:\n  control:\n    socket: {}\n\
                 cipher: aes\n\
                 tun:\n  dev: {INNER}\n  mtu: {MTU}\n  use_offloads: true\n\
                 firewall:\n  outbound:\n    - port: any\n      proto: any\n      host: any\n  \
                 inbound:\n    - port: any\n      proto: any\n      host: any\n",
                certificates.authority.display(),
                certificate.display(),
                key.display(),
                INNER_ADDRESSES[1 - host],
                outer[1 - host],
                outer[host],
                socket.display(),
            );
            let file = ground.file(host, "nebula/config.yml", &text)?;
            let mut command = netns::command(&program);
            command.arg("-config").arg(file);
            ground.start(&mut tunnel, host, command)?;
        }
        Ok(tunnel)
    }
}

/// An authority, and a certificate with its key for each host.
struct Certificates {
    authority: PathBuf,
    hosts: Vec<(PathBuf, PathBuf)>,
}

impl Certificates {
    fn make(ground: &Ground) -> Result<Self, LabError> {
        let tool = program("nebula-cert", "nebula").map_err(LabError::Which)?;
        // It does not write over files, so only their folder is made.
        let folder = ground.file(0, "nebula/keys/of", "the bench\n")?;
        let at = |name: &str| folder.with_file_name(name);
        for name in ["ca.crt", "ca.key", "0.crt", "0.key", "1.crt", "1.key"] {
            // There is none at the first time.
            let _ = std::fs::remove_file(at(name));
        }
        let (authority, authority_key) = (at("ca.crt"), at("ca.key"));
        let mut command = netns::command(&tool);
        command
            .args(["ca", "-name", "lab", "-out-crt"])
            .arg(&authority);
        process::run(command.arg("-out-key").arg(&authority_key))?;
        let mut hosts = Vec::new();
        for (host, address) in INNER_ADDRESSES.into_iter().enumerate() {
            let [certificate, key] = ["crt", "key"].map(|end| at(&format!("{host}.{end}")));
            let mut command = netns::command(&tool);
            command.args(["sign", "-name", &format!("host-{host}")]);
            command
                .args(["-ip", &format!("{address}/24"), "-ca-crt"])
                .arg(&authority);
            command.arg("-ca-key").arg(&authority_key);
            command.arg("-out-crt").arg(&certificate);
            process::run(command.arg("-out-key").arg(&key))?;
            hosts.push((certificate, key));
        }
        Ok(Self { authority, hosts })
    }
}
