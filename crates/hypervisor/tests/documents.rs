//! Tests that this program accepts the examples in `docs/operating.md`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use longhaul_hypervisor::config::{AcceleratorChoice, HostConfig, Network};
use longhaul_hypervisor::description;
use std::path::Path;

fn example(kind: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operating.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (_, rest) = text.split_once(&format!("```toml {kind}\n")).unwrap();
    rest.split_once("\n```").unwrap().0.to_owned()
}

#[test]
fn the_configuration_is_one() {
    let config: HostConfig = toml::from_str(&example("host")).unwrap();
    assert_eq!(config.default_emulator(), Some("10.0"));
    assert_eq!(config.qemu.accelerator, AcceleratorChoice::Auto);
    assert_eq!(config.networks["lab"], Network::None);
    // The configured user may be absent on the machine of this test.
    let mut config = config;
    config.qemu.run_as = None;
    config.check(Path::new("docs/operating.md")).unwrap();
}

#[test]
fn the_guest_is_one() {
    let guest = description::parse(&example("guest")).unwrap();
    assert_eq!(guest.name, "web-7");
    assert_eq!(guest.disks.len(), 1);
}
