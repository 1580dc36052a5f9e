//! Configures tinc in switch mode.

use std::fs;

use super::version_of;
use crate::bench::network::ground::{Ground, INNER, INNER_ADDRESSES, Tunnel, program};
use crate::bench::network::system::{Kind, System};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::netns;
use longhaul_lab::process;

/// tinc 1.0. It has no AEAD: its defaults are AES-256-CBC with SHA-256, no compression, and
/// discovery of the MTU with TCP's segments limited to it.
pub(in crate::bench::network) struct Tinc;

const NAMES: [&str; 2] = ["first", "second"];

impl System for Tinc {
    fn name(&self) -> &'static str {
        "tinc"
    }

    fn kind(&self) -> Kind {
        Kind::Layer2
    }

    fn version(&self) -> Result<String, String> {
        version_of(&program("tincd", "tinc")?, &["--version"])
    }

    fn start(&self, ground: &Ground) -> Result<Tunnel, LabError> {
        let program = program("tincd", "tinc").map_err(LabError::Which)?;
        let outer = ground.outer()?;
        let mut published = Vec::new();
        let mut folders = Vec::new();
        for host in [0, 1] {
            let (own, other) = (NAMES[host], NAMES[1 - host]);
            let connect = match host {
                0 => format!("ConnectTo = {other}\n"),
                _ => String::new(),
            };
            let text = format!(
                "Name = {own}\nMode = switch\nDeviceType = tap\nInterface = {INNER}\n\
                 AddressFamily = ipv4\nBindToAddress = {}\n{connect}",
                outer[host]
            );
            let config = ground.file(host, "tinc/tinc.conf", &text)?;
            let address = format!("Address = {}\n", outer[host]);
            let own_file = ground.file(host, &format!("tinc/hosts/{own}"), &address)?;
            let folder = config.with_file_name("");
            let mut keys = netns::command(&program);
            keys.arg("-c").arg(&folder).args(["-K", "2048"]);
            process::run(&mut keys)?;
            let public = fs::read_to_string(&own_file);
            published.push(public.during(|| format!("read {}", own_file.display()))?);
            folders.push(folder);
        }
        let mut tunnel = Tunnel::new(INNER_ADDRESSES, INNER);
        for host in [1, 0] {
            let other = format!("tinc/hosts/{}", NAMES[1 - host]);
            ground.file(host, &other, &published[1 - host])?;
            let folder = &folders[host];
            let mut command = netns::command(&program);
            command.arg("-c").arg(folder).arg("-D");
            command.arg(format!("--pidfile={}", folder.join("pid").display()));
            ground.start(&mut tunnel, host, command)?;
        }
        ground.address(&tunnel, INNER, INNER_ADDRESSES)?;
        Ok(tunnel)
    }
}
