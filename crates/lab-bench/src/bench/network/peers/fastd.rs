//! Configures fastd with TAP interfaces.

use super::version_of;
use crate::bench::network::ground::{Ground, INNER, INNER_ADDRESSES, Tunnel, printed, program};
use crate::bench::network::system::{Kind, System};
use longhaul_lab::error::LabError;
use longhaul_lab::netns;

const PORT: u16 = 10_000;
/// What fits a way of 1500 bytes without fragments: less IPv4, UDP, fastd's header and Ethernet's.
const MTU: u32 = 1500 - 20 - 8 - 24 - 14;

/// fastd. Of its methods that encrypt and authenticate, the manual names `salsa2012+umac` as the
/// fast one in general and `aes128-ctr+umac` for processors that have AES. Its L2TP method, which
/// the kernel carries, does neither.
pub(in crate::bench::network) struct Fastd;

const METHOD: &str = "aes128-ctr+umac";

impl System for Fastd {
    fn name(&self) -> &'static str {
        "fastd"
    }

    fn kind(&self) -> Kind {
        Kind::Layer2
    }

    fn version(&self) -> Result<String, String> {
        version_of(&program("fastd", "fastd")?, &["--version"])
    }

    fn start(&self, ground: &Ground) -> Result<Tunnel, LabError> {
        let program = program("fastd", "fastd").map_err(LabError::Which)?;
        let outer = ground.outer()?;
        let mut keys = Vec::new();
        for _ in outer {
            let said = printed(&program, &["--generate-key"])?;
            let of = |name: &str| {
                let line = said.lines().find_map(|line| line.strip_prefix(name));
                line.map(|key| key.trim().to_owned())
                    .ok_or_else(|| LabError::Answer {
                        what: "fastd --generate-key".to_owned(),
                        message: format!("no line `{name}`"),
                    })
            };
            keys.push((of("Secret:")?, of("Public:")?));
        }
        let mut tunnel = Tunnel::new(INNER_ADDRESSES, INNER);
        for host in [1, 0] {
            let text = format!(
                "log level info;\nmode tap;\ninterface \"{INNER}\";\nmtu {MTU};\n\
                 method \"{METHOD}\";\nsecure handshakes yes;\nbind {}:{PORT};\n\
                 secret \"{}\";\npeer \"other\" {{\n  key \"{}\";\n  remote {}:{PORT};\n}}\n",
                outer[host],
                keys[host].0,
                keys[1 - host].1,
                outer[1 - host],
            );
            let file = ground.file(host, "fastd/fastd.conf", &text)?;
            let mut command = netns::command(&program);
            command.arg("--config").arg(file);
            ground.start(&mut tunnel, host, command)?;
        }
        ground.address(&tunnel, INNER, INNER_ADDRESSES)?;
        Ok(tunnel)
    }
}
