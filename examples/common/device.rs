//! What an example computes on.

use super::message;
use candle_core::{bail, Device, Result};
use std::fmt;
use std::str::FromStr;

/// A device by the name that `--device` takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeviceName {
    #[default]
    Cpu,
    /// An NVIDIA GPU by its number.
    Cuda(usize),
}

impl DeviceName {
    /// # Errors
    /// When this program was built without the feature, or there is no such GPU.
    pub fn open(self) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda(_) if !cfg!(feature = "cuda") => {
                bail!("--device {self}: built without the cuda feature: cargo run --release --features cuda …")
            }
            Self::Cuda(number) => match Device::new_cuda(number) {
                Ok(device) => Ok(device),
                Err(error) => {
                    let error = message(&error);
                    let why = match error.contains("STUB_LIBRARY") {
                        true => " (these are the stand-ins of kernels/toolkit.sh, not a driver: unset LD_LIBRARY_PATH)",
                        false => "",
                    };
                    bail!("--device {self}: no such GPU here: {error}{why}")
                }
            },
        }
    }
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        let number = |number: &str| {
            let digits = number.bytes().all(|digit| digit.is_ascii_digit());
            number.parse().ok().filter(|_| digits)
        };
        match name.split_once(':') {
            None if name == "cpu" => Some(Self::Cpu),
            None if name == "cuda" => Some(Self::Cuda(0)),
            Some(("cuda", rest)) => number(rest).map(Self::Cuda),
            _ => None,
        }
        .ok_or_else(|| "it is cpu, cuda, or cuda:N for the GPU of number N, from 0".into())
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(0) => f.write_str("cuda"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_is_read_from_its_name_and_told_by_it() {
        for (name, device) in [
            ("cpu", DeviceName::Cpu),
            ("cuda", DeviceName::Cuda(0)),
            ("cuda:3", DeviceName::Cuda(3)),
        ] {
            assert_eq!(name.parse(), Ok(device));
            assert_eq!(device.to_string(), name);
        }
        assert_eq!("cuda:0".parse(), Ok(DeviceName::Cuda(0)));
        assert!(DeviceName::Cpu.open().is_ok_and(|device| device.is_cpu()));
    }

    #[test]
    fn name_of_no_device_is_refused() {
        for name in [
            "",
            "gpu",
            "CUDA",
            "cuda:",
            "cuda:-1",
            "cuda:+1",
            "cuda:x",
            "cuda:1:2",
            "cpu:0",
            "cuda1",
            "cuda:99999999999999999999",
        ] {
            let error = name.parse::<DeviceName>().unwrap_err();
            assert!(error.contains("cuda:N"), "{name}: {error}");
        }
    }

    /// No machine has so many GPUs; most have none.
    #[test]
    fn device_that_is_not_there_is_refused_in_one_line() {
        let error = message(&DeviceName::Cuda(1 << 20).open().unwrap_err());
        let reason = match cfg!(feature = "cuda") {
            true => "no such GPU",
            false => "built without the cuda feature",
        };
        assert!(error.starts_with("--device cuda:1048576: "), "{error}");
        assert!(
            error.contains(reason) && error.lines().count() == 1,
            "{error}"
        );
    }
}
